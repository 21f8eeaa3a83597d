#include "megatron/datasets/sources/conversation.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

using OrderedJson = nlohmann::ordered_json;

const std::map<std::string_view, const char*>& roles_of_sharegpt() {
  static const std::map<std::string_view, const char*> kRoles = {
      {"human", "user"},
      {"user", "user"},
      {"gpt", "assistant"},
      {"assistant", "assistant"},
      {"chatgpt", "assistant"},
      {"model", "assistant"},
      {"function_call", "assistant"},
      {"system", "system"},
      {"tool", "tool"},
      {"function", "tool"},
      {"observation", "tool"},
      {"function_response", "tool"},
  };
  return kRoles;
}

OrderedJson message_of(const OrderedJson& given, const std::string& where) {
  MEGATRON_CHECK(given.is_object(), where, ": a message is ", given.type_name(),
                 ", expected an object");
  if (given.contains("role")) {
    MEGATRON_CHECK(given["role"].is_string(), where, ": the role of a message is ",
                   given["role"].type_name(), ", expected a string");
    return given;
  }
  MEGATRON_CHECK(given.contains("from") && given["from"].is_string() && given.contains("value"),
                 where, ": a message has neither role and content nor from and value");
  const auto role = roles_of_sharegpt().find(given["from"].get<std::string>());
  MEGATRON_CHECK(role != roles_of_sharegpt().end(), where, ": a message is from \"",
                 given["from"].get<std::string>(), "\", expected human, gpt, system or tool");
  return {{"role", role->second}, {"content", given["value"]}};
}

void add_messages(const OrderedJson& list, const char* key, const std::string& where,
                  Conversation& out) {
  MEGATRON_CHECK(list.is_array(), where, ": \"", key, "\" is ", list.type_name(),
                 ", expected a list of messages");
  for (const OrderedJson& given : list) {
    const OrderedJson message = message_of(given, where);
    out.is_assistant.push_back(message["role"] == "assistant");
    out.messages.push_back(message.dump());
  }
}

// instruction, input and output. `history`, of some such files, holds the turns before.
void add_alpaca(const OrderedJson& row, const std::string& where, Conversation& out) {
  const auto text = [&](const char* key) {
    if (!row.contains(key) || row[key].is_null()) return std::string();
    MEGATRON_CHECK(row[key].is_string(), where, ": \"", key, "\" is ", row[key].type_name(),
                   ", expected a string");
    return row[key].get<std::string>();
  };
  OrderedJson messages = OrderedJson::array();
  const auto add = [&](const char* role, const OrderedJson& content) {
    messages.push_back({{"role", role}, {"content", content}});
  };
  if (const std::string system = text("system"); !system.empty()) add("system", system);
  if (row.contains("history") && !row["history"].is_null()) {
    MEGATRON_CHECK(row["history"].is_array(), where, ": \"history\" is no list");
    for (const OrderedJson& turn : row["history"]) {
      MEGATRON_CHECK(
          turn.is_array() && turn.size() == 2 && turn[0].is_string() && turn[1].is_string(), where,
          ": a turn of \"history\" is no pair of instruction and output");
      add("user", turn[0]);
      add("assistant", turn[1]);
    }
  }
  std::string request = text("instruction");
  const std::string input = text("input"), output = text("output");
  if (!input.empty()) request += (request.empty() ? "" : "\n\n") + input;
  MEGATRON_CHECK(!request.empty(), where, ": the instruction is empty");
  MEGATRON_CHECK(!output.empty(), where, ": the output is empty");
  add("user", request);
  add("assistant", output);
  add_messages(messages, "instruction", where, out);
}

[[noreturn]] void refuse_form(const OrderedJson& row, const std::string& where) {
  std::string keys;
  for (const auto& [key, value] : row.items())
    if (keys.size() < 200) keys += cat(keys.empty() ? "" : ", ", key);
  throw_error(cat(where, ": has none of messages, conversations, prompt and completion, ",
                  "instruction and output; it has ", keys.empty() ? "no members" : keys,
                  "\nhint: the forms are messages: [{role, content}, ...], conversations: [{from, "
                  "value}, ...], prompt and completion, or instruction, input and output"));
}

std::string list_text(const std::vector<std::string>& messages, size_t count) {
  std::string out = "[";
  for (size_t i = 0; i < count; ++i) out += cat(i > 0 ? "," : "", messages[i]);
  return out + "]";
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                             a.begin());
}

// The length of the common prefix of `closing`, which ends a last turn, and of what follows the
// turn. Where they differ, a marker of the next turn may have begun ("<|"): the last newline or
// bracket before the difference is the last byte of this turn.
size_t shared_closing(std::string_view following, std::string_view closing) {
  const size_t shared = common_prefix(following, closing);
  if (shared == closing.size()) return shared;
  const size_t last = closing.substr(0, shared).find_last_of("\n>]");
  return last == std::string_view::npos ? 0 : last + 1;
}

// Offset of each token, and the end of the last one; empty if the tokens do not reproduce the text
// byte for byte.
std::vector<size_t> token_offsets(const Tokenizer& tokenizer, std::string_view text,
                                  const std::vector<int32_t>& ids) {
  std::vector<size_t> offsets = {0};
  for (const int32_t id : ids) {
    const std::string bytes = tokenizer.token_bytes(id);
    if (text.substr(offsets.back(), bytes.size()) != bytes) return {};
    offsets.push_back(offsets.back() + bytes.size());
  }
  return offsets.back() == text.size() ? offsets : std::vector<size_t>();
}

}  // namespace

Conversation with_hidden_tokens(const Tokenizer& tokenizer, Conversation conversation) {
  for (std::string* text : {&conversation.tools, &conversation.variables})
    *text = hide_special_tokens(tokenizer, *text);
  for (std::string& text : conversation.messages) text = hide_special_tokens(tokenizer, text);
  return conversation;
}

Conversation parse_conversation(std::string_view json, const std::string& where) {
  const OrderedJson row = OrderedJson::parse(json, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(row.is_object(), where, ": is no JSON object");
  const auto given = [&](const char* key) { return row.contains(key) && !row[key].is_null(); };
  Conversation out;
  if (given("messages")) {
    add_messages(row["messages"], "messages", where, out);
  } else if (given("conversations")) {
    add_messages(row["conversations"], "conversations", where, out);
  } else if (given("instruction") && given("output")) {
    add_alpaca(row, where, out);
  } else {
    if (!given("prompt") || !given("completion")) refuse_form(row, where);
    const OrderedJson &prompt = row["prompt"], &completion = row["completion"];
    if (prompt.is_string() && completion.is_string()) {
      out.prompt = prompt.get<std::string>();
      out.completion = completion.get<std::string>();
      MEGATRON_CHECK(!out.completion.empty(), where, ": the completion is empty");
      return out;
    }
    add_messages(prompt, "prompt", where, out);
    out.first_completion = out.messages.size();
    add_messages(completion, "completion", where, out);
  }
  MEGATRON_CHECK(!out.messages.empty(), where, ": the conversation has no messages");
  if (given("tools")) {
    // Table columns hold them as text.
    out.tools = row["tools"].is_string() ? row["tools"].get<std::string>() : row["tools"].dump();
    const OrderedJson tools = OrderedJson::parse(out.tools, nullptr, false);
    MEGATRON_CHECK(tools.is_array(), where, ": \"tools\" is no list");
    if (tools.empty()) out.tools.clear();
  }
  if (given("chat_template_kwargs")) {
    MEGATRON_CHECK(row["chat_template_kwargs"].is_object(), where,
                   ": \"chat_template_kwargs\" is no object");
    out.variables = row["chat_template_kwargs"].dump();
  }
  return out;
}

std::filesystem::path tokenizer_folder(const TokenizerConfig& config) {
  const std::filesystem::path model =
      config.tokenizer_model.empty() ? config.vocab_file : config.tokenizer_model;
  if (model.empty() || std::filesystem::is_directory(model)) return model;
  return model.has_parent_path() ? model.parent_path() : ".";
}

ConversationEncoder::ConversationEncoder(const Tokenizer& tokenizer,
                                         const std::filesystem::path& folder,
                                         const SftConfig& config)
    : tokenizer_(tokenizer), loss_on_(config.sft_loss_on) {
  const std::string given = config.given_template();
  try {
    template_.emplace(load_chat_template(folder, given));
    tool_template_.emplace(load_chat_template(folder, given, /*has_tools=*/true));
  } catch (const Error& error) {
    if (!given.empty()) throw;
    why_no_template_ = error.what();
  }
}

// Note [What the assistant wrote]
// If a template marks generation, the bytes between {% generation %} and {% endgeneration %} are
// trained on, and every token that overlaps them, as in transformers. Otherwise the turn of the
// assistant at message i is what its rendering adds: from the end of the rendering of the earlier
// messages with a generation prompt, to the end of the rendering of the messages up to it; both
// must be prefixes of the whole text. So the role's header is not trained on, and what closes the
// turn is. Some templates render a turn differently once others follow (they move the system
// message, or drop thoughts). Then the turn is found by rendering the conversation again with
// another content in its place: what changes is the content, and the text that follows it in the
// rendering up to the turn closes it, as far as the whole text agrees. At the end of a turn only
// tokens that lie in it entirely are trained on.
std::vector<TextSpan> ConversationEncoder::spans(const Conversation& conversation,
                                                 const RenderedChat& chat,
                                                 const std::string& where) const {
  const std::vector<std::string>& messages = conversation.messages;
  const ChatTemplate& chat_template = conversation.tools.empty() ? *template_ : *tool_template_;
  std::vector<TextSpan> out;
  if (chat_template.marks_generation()) {
    for (const auto& [begin, end] : chat.generated)
      if (end > begin) out.push_back({begin, end, true});
    // Turns of the prompt come first.
    const auto of_prompt =
        std::count(conversation.is_assistant.begin(),
                   conversation.is_assistant.begin() +
                       static_cast<std::ptrdiff_t>(conversation.first_completion),
                   true);
    out.erase(out.begin(), out.begin() + std::min<std::ptrdiff_t>(
                                             of_prompt, static_cast<std::ptrdiff_t>(out.size())));
    return out;
  }
  const std::string_view text = chat.text;
  ChatInput input;
  input.tools = conversation.tools;
  input.variables = conversation.variables;
  const auto rendered = [&](const std::vector<std::string>& list, size_t count, bool prompt) {
    input.messages = list_text(list, count);
    input.add_generation_prompt = prompt;
    return chat_template.render(input).text;
  };
  const auto last_assistant = static_cast<size_t>(std::find(conversation.is_assistant.rbegin(),
                                                            conversation.is_assistant.rend(), true)
                                                      .base() -
                                                  conversation.is_assistant.begin()) -
                              1;
  for (size_t i = conversation.first_completion; i < messages.size(); ++i) {
    if (!conversation.is_assistant[i] || (loss_on_ == SftLossOn::kLast && i != last_assistant))
      continue;
    const std::string before = i == 0 ? "" : rendered(messages, i, true);
    const std::string up_to =
        i + 1 == messages.size() ? chat.text : rendered(messages, i + 1, false);
    if (text.starts_with(before) && text.starts_with(up_to) && up_to.size() >= before.size()) {
      out.push_back({before.size(), up_to.size()});
      continue;
    }
    const std::string mark = "@@the turn of the assistant@@";
    std::vector<std::string> other = messages;
    OrderedJson message = OrderedJson::parse(messages[i]);
    message["content"] = mark;
    other[i] = message.dump();
    const std::string whole = rendered(other, messages.size(), false),
                      until = rendered(other, i + 1, false);
    const size_t at = whole.find(mark), at_until = until.find(mark);
    const size_t after = whole.size() - std::min(whole.size(), at + mark.size());
    const bool found = at != std::string::npos && at_until != std::string::npos &&
                       at + after <= text.size() &&
                       text.starts_with(std::string_view(whole).substr(0, at)) &&
                       text.ends_with(std::string_view(whole).substr(whole.size() - after));
    MEGATRON_CHECK(
        found, where, ": ", chat_template.name(), " writes message ", i + 1,
        " differently when others follow, so that the assistant's words cannot be told from the "
        "rest",
        "\nhint: mark them with {% generation %} in a template of your own (--chat-template FILE)");
    const size_t end = text.size() - after;
    const std::string_view closing = std::string_view(until).substr(at_until + mark.size());
    out.push_back({at, end + shared_closing(text.substr(end), closing)});
  }
  return out;
}

RenderedConversation ConversationEncoder::render(const Conversation& conversation,
                                                 const std::string& where) const {
  RenderedConversation out;
  if (conversation.messages.empty()) {
    out.text = conversation.prompt + conversation.completion;
    out.trained = {{conversation.prompt.size(), out.text.size(), true}};
  } else {
    MEGATRON_CHECK(template_.has_value(), why_no_template_);
    ChatInput input;
    input.messages = list_text(conversation.messages, conversation.messages.size());
    input.tools = conversation.tools;
    input.variables = conversation.variables;
    try {
      RenderedChat chat = (conversation.tools.empty() ? *template_ : *tool_template_).render(input);
      if (loss_on_ != SftLossOn::kAll) out.trained = spans(conversation, chat, where);
      out.text = std::move(chat.text);
    } catch (const Error& error) {
      const std::string message = error.what();
      throw_error(message.starts_with(where) ? message : cat(where, ": ", message));
    }
    if (loss_on_ == SftLossOn::kLast && out.trained.size() > 1)
      out.trained.erase(out.trained.begin(), out.trained.end() - 1);
  }
  if (loss_on_ == SftLossOn::kAll) out.trained = {{0, out.text.size(), true}};
  return out;
}

void ConversationEncoder::encode_append(const Conversation& conversation, const std::string& where,
                                        std::vector<int32_t>& out) const {
  encode_append(render(with_hidden_tokens(tokenizer_, conversation), where), out);
  if (conversation.messages.empty())
    if (const std::optional<int32_t> eod = tokenizer_.eod()) out.push_back(*eod);
}

void ConversationEncoder::encode_append(const RenderedConversation& rendered,
                                        std::vector<int32_t>& out) const {
  const std::vector<int32_t> ids = encode_rendered(tokenizer_, rendered.text);
  const std::vector<size_t> offsets = token_offsets(tokenizer_, rendered.text, ids);
  std::vector<bool> counts(ids.size(), false);
  // Without offsets: tokens before a position are those with which the encoding of the text up to
  // it also begins.
  const auto tokens_before = [&](size_t place) {
    const std::vector<int32_t> prefix =
        encode_rendered(tokenizer_, std::string_view(rendered.text).substr(0, place));
    return static_cast<size_t>(
        std::mismatch(ids.begin(), ids.end(), prefix.begin(), prefix.end()).first - ids.begin());
  };
  for (const TextSpan& span : rendered.trained) {
    size_t first = 0, last = 0;
    if (offsets.empty()) {
      first = tokens_before(span.begin);
      last = tokens_before(span.end);
    } else {
      // The token that contains the first byte, and the one after the last.
      first = static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), span.begin) -
                                  offsets.begin()) -
              1;
      last = span.takes_last_token_whole
                 ? static_cast<size_t>(std::lower_bound(offsets.begin(), offsets.end(), span.end) -
                                       offsets.begin())
                 : static_cast<size_t>(std::upper_bound(offsets.begin(), offsets.end(), span.end) -
                                       offsets.begin()) -
                       1;
    }
    for (size_t i = first; i < std::min(last, ids.size()); ++i) counts[i] = true;
  }
  for (size_t i = 0; i < ids.size(); ++i) out.push_back(counts[i] ? ids[i] : ~ids[i]);
}

std::string ConversationEncoder::description() const {
  JsonWriter json;
  json.begin_object().member("tokenizer", tokenizer_.fingerprint());
  json.member("chat_template", template_ ? hash_text(template_->source()) : std::string());
  json.member("tool_template",
              tool_template_ ? hash_text(tool_template_->source()) : std::string());
  json.member("loss_on", static_cast<int64_t>(loss_on_)).end_object();
  return json.text();
}

}  // namespace megatron
