#include "megatron/inference/chat.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "megatron/base/check.h"
#include "megatron/chat/chat_template.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

ChatTemplate load_template(const TemplateSource& templates, const std::string& given,
                           bool has_tools) {
  MEGATRON_CHECK(!templates.empty() || !given.empty(), "the tokenizer has no chat template",
                 "\nhint: give one with --chat-template FILE");
  return load_chat_template(templates, given, has_tools);
}

// The first special token that follows a message of the assistant; none: the template ends turns
// with plain text, or rejects the probe conversation.
std::optional<int32_t> end_of_turn(const ChatTemplate& chat_template, const Tokenizer& tokenizer) {
  constexpr std::string_view kMark = "@@the turn of the assistant@@";
  ChatInput input;
  input.messages = cat("[", chat_message("user", "?"), ",", chat_message("assistant", kMark), "]");
  std::string text;
  try {
    text = chat_template.render(input).text;
  } catch (const Error&) {
    return std::nullopt;
  }
  const size_t at = text.find(kMark);
  if (at == std::string::npos) return std::nullopt;
  for (const int32_t id :
       encode_rendered(tokenizer, std::string_view(text).substr(at + kMark.size())))
    if (tokenizer.is_special(id)) return id;
  return std::nullopt;
}

}  // namespace

std::string chat_message(std::string_view role, std::string_view content) {
  using Json = nlohmann::ordered_json;
  return Json{{"role", role}, {"content", content}}.dump(-1, ' ', false,
                                                         Json::error_handler_t::replace);
}

Chat::Chat(const Tokenizer& tokenizer, const TemplateSource& templates,
           const std::string& chat_template, std::span<const int32_t> eos)
    : template_(load_template(templates, chat_template, /*has_tools=*/false)),
      tool_template_(load_template(templates, chat_template, /*has_tools=*/true)) {
  std::set<int32_t> stops(eos.begin(), eos.end());
  if (const auto eod = tokenizer.eod()) stops.insert(*eod);
  if (const auto end = end_of_turn(template_, tokenizer)) stops.insert(*end);
  stop_tokens_.assign(stops.begin(), stops.end());
}

std::string Chat::prompt(const Conversation& conversation, const std::string& where) const {
  MEGATRON_CHECK(!conversation.messages.empty(), where,
                 ": prompt and completion are plain texts, which no template is for",
                 "\nhint: give messages, or generate without --chat");
  MEGATRON_CHECK(!conversation.is_assistant.back(), where,
                 ": the last message is the assistant's, so there is nothing to answer");
  ChatInput input;
  input.messages = "[";
  for (size_t i = 0; i < conversation.messages.size(); ++i)
    input.messages += cat(i > 0 ? "," : "", conversation.messages[i]);
  input.messages += "]";
  input.tools = conversation.tools;
  input.variables = conversation.variables;
  input.add_generation_prompt = true;
  try {
    return (conversation.tools.empty() ? template_ : tool_template_).render(input).text;
  } catch (const Error& error) {
    throw_error(cat(where, ": ", error.what()));
  }
}

}  // namespace megatron
