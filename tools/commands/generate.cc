// megatron generate: text generation from prompts, or chat.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/speculation/served_draft.h"
#include "tools/support/input_path.h"
#include "tools/support/load_model_flags.h"
#include "tools/support/neighbor_lookup.h"

namespace megatron {
namespace {

struct GenerateConfig : Config {
  std::vector<std::string> prompt;
  std::string prompts_file;
  int64_t tokens_to_generate = 64;
  std::vector<std::string> stop;
  bool ignore_eod = false;
  bool chat = false;
  std::string system;
  std::string chat_template;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("generate");
    v.field("prompt", prompt, "one or more texts to continue");
    v.field("prompts_file", prompts_file,
            "a file of prompts (-: standard input), one a line; with .jsonl each line is an object "
            "with \"prompt\" or "
            "\"text\", with --chat a conversation (\"messages\")");
    v.field({"tokens_to_generate", "--tokens-to-generate --num-tokens-to-generate"},
            tokens_to_generate, "tokens after each prompt");
    v.field({"stop", "--stop --stop-words"}, stop, "texts at which generation ends");
    v.field("ignore_eod", ignore_eod, "go on after the end-of-document token");
    v.field("chat", chat,
            "answer messages, by the tokenizer's chat template, until the turn ends: each --prompt "
            "is one of a user, --prompts-file holds conversations; with neither, each line of the "
            "standard input is the user's next message");
    v.field("system", system, "with --chat: a system message at the start");
    v.field("chat_template", chat_template,
            "with --chat: a file with a template, or the template, in place of the tokenizer's");
    v.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    if (chat ? !prompt.empty() && !prompts_file.empty() : prompt.empty() == prompts_file.empty())
      violations.add(chat ? "--prompt and --prompts-file are both given, expected one or neither"
                          : "exactly one of --prompt and --prompts-file is needed");
    if (chat && ignore_eod)
      violations.add("--ignore-eod has no effect with --chat, where replies end with their turn");
    if (!chat && !system.empty()) violations.add("--system has no effect without --chat");
    if (!chat && !chat_template.empty())
      violations.add("--chat-template has no effect without --chat");
    if (tokens_to_generate <= 0)
      violations.add(cat("--tokens-to-generate ", tokens_to_generate, " must be positive"));
    for (const std::string& text : stop)
      if (text.empty()) violations.add("--stop: an empty text would end everything");
  }
};

std::string prompt_of_line(const std::string& path, size_t number, const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(object.is_object(), path, ":", number, ": expected a JSON object");
  for (const char* key : {"prompt", "text"})
    if (object.contains(key) && object[key].is_string()) return object[key];
  throw_error(cat(path, ":", number, ": no string under \"prompt\" or \"text\""));
}

std::vector<std::string> read_prompts(const GenerateConfig& config) {
  if (config.prompts_file.empty()) return config.prompt;
  const std::string text = read_file(input_path(config.prompts_file));
  std::vector<std::string> prompts;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    std::string line = text.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    ++number;
    if (!line.empty())
      prompts.push_back(config.prompts_file.ends_with(".jsonl")
                            ? prompt_of_line(config.prompts_file, number, line)
                            : line);
    begin = end + 1;
  }
  MEGATRON_CHECK(!prompts.empty(), config.prompts_file, " holds no prompts");
  return prompts;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStopText:
      return "stop";
    case FinishReason::kEndToken:
      return "end_of_document";
    default:
      return "";
  }
}

void write_generation(const Generation& result, JsonWriter& json) {
  json.member("text", result.text).member("finish_reason", name_of(result.finish_reason));
  json.key("tokens").begin_array();
  for (const int32_t token : result.tokens) json.value(token);
  json.end_array();
}

void print_json(const std::vector<std::string>& prompts, const std::vector<Generation>& results) {
  JsonWriter json(2);
  json.begin_array();
  for (size_t i = 0; i < results.size(); ++i) {
    json.begin_object().member("prompt", prompts[i]);
    write_generation(results[i], json);
    json.end_object();
  }
  json.end_array();
  print_line(json.text());
}

// `continues`: the texts go on where the prompts end.
void print_text(const std::vector<std::string>& prompts, const std::vector<Generation>& results,
                bool continues) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (i > 0) print_line("---");
    print_line((continues ? prompts[i] : "") + results[i].text);
  }
}

void print_now(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// -- conversations

void add_message(Conversation& conversation, std::string_view role, std::string_view content) {
  conversation.messages.push_back(chat_message(role, content));
  conversation.is_assistant.push_back(role == "assistant");
}

// A conversation with no message except --system.
Conversation start_conversation(const GenerateConfig& config) {
  Conversation conversation;
  if (!config.system.empty()) add_message(conversation, "system", config.system);
  return conversation;
}

struct Asked {
  Conversation conversation;
  std::string where;  // for errors
};

std::vector<Asked> read_conversations(const GenerateConfig& config) {
  std::vector<Asked> asked;
  for (size_t i = 0; i < config.prompt.size(); ++i) {
    asked.push_back({start_conversation(config), cat("--prompt ", i + 1)});
    add_message(asked.back().conversation, "user", config.prompt[i]);
  }
  if (config.prompts_file.empty()) return asked;
  const std::string text = read_file(input_path(config.prompts_file));
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = cat(config.prompts_file, ":", number);
    Conversation given = parse_conversation(line, where);
    Conversation conversation = start_conversation(config);
    MEGATRON_CHECK(config.system.empty() || given.messages.empty() ||
                       nlohmann::json::parse(given.messages[0])["role"] != "system",
                   where, ": has a system message of its own\nhint: leave out --system");
    given.messages.insert(given.messages.begin(), conversation.messages.begin(),
                          conversation.messages.end());
    given.is_assistant.insert(given.is_assistant.begin(), conversation.is_assistant.begin(),
                              conversation.is_assistant.end());
    asked.push_back({std::move(given), where});
  }
  MEGATRON_CHECK(!asked.empty(), config.prompts_file, " holds no conversations");
  return asked;
}

// A reply and its conversation.
struct Answer {
  std::vector<std::string> messages;  // including the reply
  std::string prompt;
  Generation generation;
};

void print_answers(const std::vector<Answer>& answers) {
  JsonWriter json(2);
  json.begin_array();
  for (const Answer& answer : answers) {
    nlohmann::ordered_json messages = nlohmann::ordered_json::array();
    for (const std::string& message : answer.messages)
      messages.push_back(nlohmann::ordered_json::parse(message));
    json.begin_object().key("messages").raw(messages.dump());
    json.member("prompt", answer.prompt).key("prompt_tokens").begin_array();
    for (const int32_t token : answer.generation.prompt_tokens) json.value(token);
    json.end_array();
    write_generation(answer.generation, json);
    json.end_object();
  }
  json.end_array();
  print_line(json.text());
}

class ChatRun {
 public:
  ChatRun(const GenerateConfig& config, LoadedModel& loaded, GenerateOptions options)
      : config_(config),
        loaded_(loaded),
        chat_(*loaded.tokenizer, loaded.chat_templates, config.chat_template, loaded.end_of_text),
        options_(std::move(options)) {
    options_.stop_tokens = chat_.stop_tokens();
    options_.skip_special_tokens = true;
  }

  // Answers all conversations in one batch.
  void answer_all(std::vector<Asked> asked) {
    std::vector<std::string> prompts;
    for (const Asked& one : asked) prompts.push_back(chat_.prompt(one.conversation, one.where));
    const bool stream = prompts.size() == 1 && !config_.json;
    std::vector<Generation> results = run(prompts, stream);
    for (size_t i = 0; i < results.size(); ++i) {
      if (!config_.json && !stream) print_line(cat(i > 0 ? "---\n" : "", results[i].text));
      add_message(asked[i].conversation, "assistant", results[i].text);
      answers_.push_back({asked[i].conversation.messages, prompts[i], std::move(results[i])});
    }
    if (config_.json) print_answers(answers_);
  }

  // One conversation; each line of standard input is a message.
  void converse() {
    const bool terminal = isatty(STDIN_FILENO) != 0;
    Conversation conversation = start_conversation(config_);
    std::string line;
    for (size_t turn = 1;
         terminal && !config_.json ? print_now("> ") : void(), std::getline(std::cin, line);
         ++turn) {
      if (line.ends_with('\r')) line.pop_back();
      if (line.empty()) continue;
      add_message(conversation, "user", line);
      const std::vector<std::string> prompts = {chat_.prompt(conversation, cat("turn ", turn))};
      Generation reply = std::move(run(prompts, !config_.json).front());
      add_message(conversation, "assistant", reply.text);
      answers_.push_back({conversation.messages, prompts[0], std::move(reply)});
    }
    if (terminal && !config_.json) print_line("");
    if (config_.json) print_answers(answers_);
  }

 private:
  std::vector<Generation> run(const std::vector<std::string>& prompts, bool stream) {
    const StreamCallback print = [](size_t, std::string_view piece) { print_now(piece); };
    std::vector<Generation> results = megatron::generate(
        *loaded_.model, *loaded_.tokenizer, prompts, options_, stream ? print : StreamCallback());
    if (stream) print_line("");
    return results;
  }

  const GenerateConfig& config_;
  LoadedModel& loaded_;
  const Chat chat_;
  GenerateOptions options_;
  std::vector<Answer> answers_;
};

}  // namespace

extern "C" int megatron_generate(int argc, char** argv) {
  LoadModelConfig load;
  GenerateConfig config;
  GenerateOptions options;
  NeighborLookupConfig lookup;
  Config* const configs[] = {
      &load, &config, &options.sampling, &options.states, &options.speculation, &lookup};
  if (!parse_or_help("megatron generate DIR [--chat] --prompt TEXT [flags]", configs, argc, argv,
                     {.positional = "load"}))
    return 0;
  std::vector<Asked> conversations;
  std::vector<std::string> prompts;
  if (config.chat)
    conversations = read_conversations(config);
  else
    prompts = read_prompts(config);
  const ParallelGroups groups;
  const std::unique_ptr<LoadedDraft> draft =
      load_draft(load_model_request(load), options.speculation);
  if (draft) options.draft = draft->loaded().model.get();
  load.accept = accepts_drafts(options.speculation, draft.get());
  LoadedModel loaded = load_model(load, groups);
  const bool retrieves = loaded.config.type == "retro";
  FindNeighbors find;
  if (retrieves || lookup.given()) find = open_neighbors(lookup, loaded, load.device);
  MEGATRON_CHECK(!retrieves || !config.chat,
                 "--chat is not built for a model with retrieval\nhint: --prompt");
  options.tokens_to_generate = config.tokens_to_generate;
  options.stop = config.stop;
  options.stop_at_eod = !config.ignore_eod;
  options.decoder_start = loaded.decoder_start;
  if (!loaded.end_of_text.empty()) options.end_of_input = loaded.end_of_text.front();
  if (config.chat) {
    ChatRun run(config, loaded, options);
    if (conversations.empty())
      run.converse();
    else
      run.answer_all(std::move(conversations));
    return 0;
  }

  const bool continues = loaded.model->sequence_input() != SequenceInputUse::kRequired,
             stream = prompts.size() == 1 && !config.json;
  bool started = false;  // nothing is printed for a rejected prompt
  const StreamCallback print = [&](size_t, std::string_view piece) {
    if (!std::exchange(started, true) && continues) print_now(prompts[0]);
    print_now(piece);
  };
  const StreamCallback pieces = stream ? print : StreamCallback();
  const std::vector<Generation> results =
      retrieves ? generate_with_neighbors(*loaded.model, *loaded.tokenizer, prompts, options, find,
                                          pieces)
                : generate(*loaded.model, *loaded.tokenizer, prompts, options, pieces);
  if (stream)
    print_line(started || !continues ? "" : prompts[0]);
  else if (config.json)
    print_json(prompts, results);
  else
    print_text(prompts, results, continues);
  return 0;
}

}  // namespace megatron
