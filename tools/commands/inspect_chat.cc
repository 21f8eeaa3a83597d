// megatron inspect-chat: shows a conversation rendered by the chat template, and which of its
// tokens contribute to the fine-tuning loss.
#include <cstdio>
#include <fstream>
#include <ranges>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/datasets/sources/conversation.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tools/support/input_path.h"

namespace megatron {
namespace {

struct InspectChatConfig : Config {
  std::string input;
  int64_t row = 1;
  bool json = false;

  void fields(FieldVisitor& visitor) override {
    visitor.group("inspect-chat");
    visitor.field("input", input, "JSON lines of conversations; -: standard input (required)");
    visitor.field("row", row, "line of the file, from 1");
    visitor.field("json", json, "print JSON: text, tokens and which of them count");
  }
  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("--input is not given", "a file of JSON lines");
    if (row < 1) violations.add(cat("--row is ", row), "a line from 1 on");
  }
};

std::string read_line(const std::string& path, int64_t row) {
  const std::string input = input_path(path);
  check_input_file(input);
  std::ifstream file(input);
  MEGATRON_CHECK(file.is_open(), "--input ", path, ": there is no such file");
  std::string line;
  for (int64_t i = 0; i < row; ++i)
    MEGATRON_CHECK(std::getline(file, line), "--input ", path, ": has ", i, " lines, --row is ",
                   row);
  return line;
}

void print_json(const RenderedConversation& rendered, const std::vector<int32_t>& marked) {
  JsonWriter json(2);
  json.begin_object().member("text", rendered.text);
  const auto token = [](int32_t id) { return id < 0 ? ~id : id; };
  json.member("tokens", std::views::transform(marked, token));
  const auto in_loss = [](int32_t id) { return id >= 0 ? 1 : 0; };
  json.member("loss_mask", std::views::transform(marked, in_loss)).end_object();
  print_line(json.text());
}

// Prints runs of tokens in the loss, or not in it, with a mark before each line.
void print_text(const Tokenizer& tokenizer, const std::vector<int32_t>& marked) {
  int64_t counted = 0;
  for (size_t begin = 0, end = 0; begin < marked.size(); begin = end) {
    const bool counts = marked[begin] >= 0;
    std::vector<int32_t> ids;
    for (end = begin; end < marked.size() && (marked[end] >= 0) == counts; ++end)
      ids.push_back(counts ? marked[end] : ~marked[end]);
    counted += counts ? static_cast<int64_t>(ids.size()) : 0;
    std::string text = tokenizer.decode(ids);
    const bool closed = text.ends_with('\n');
    if (closed) text.pop_back();
    const std::string mark = counts ? "+ " : "  ";
    std::string lines = mark;
    for (const char c : text) lines += c == '\n' ? "\n" + mark : std::string(1, c);
    print_line(lines);
  }
  print_line(cat(marked.size(), " tokens, of which ", counted, " count (+)"));
}

}  // namespace

int inspect_chat(int argc, char** argv) {
  TokenizerConfig tokenizer_config;
  SftConfig sft;
  InspectChatConfig config;
  Config* const configs[] = {&config, &tokenizer_config, &sft};
  if (!parse_or_help("megatron inspect-chat FILE --tokenizer-model FOLDER [--chat-template "
                     "FILE] [--row N]",
                     configs, argc, argv, {.positional = "input"}))
    return 0;
  if (tokenizer_config.tokenizer_type.empty())
    tokenizer_config.tokenizer_type = "HuggingFaceTokenizer";
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(tokenizer_config);
  const ConversationEncoder encoder(*tokenizer, tokenizer_folder(tokenizer_config), sft);
  const std::string where = cat(config.input, ": line ", config.row);
  const Conversation conversation = parse_conversation(read_line(config.input, config.row), where);
  std::vector<int32_t> marked;
  encoder.encode_append(conversation, where, marked);
  if (config.json) {
    print_json(encoder.render(conversation, where), marked);
  } else {
    print_text(*tokenizer, marked);
  }
  return 0;
}

}  // namespace megatron
