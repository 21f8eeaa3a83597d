// Chat with a model: the tokenizer's chat template renders messages as a prompt, and the tokens
// that end a turn end the reply.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/datasets/sources/conversation.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// One turn as a JSON object.
std::string chat_message(std::string_view role, std::string_view content);

class Chat {
 public:
  // `templates`: where the tokenizer's are; `chat_template`: a file or the template itself, empty:
  // the tokenizer's. `eos`: eos_token_id of the model's generation_config.json or config.json.
  // Throws Error if there is no template.
  Chat(const Tokenizer& tokenizer, const TemplateSource& templates,
       const std::string& chat_template, std::span<const int32_t> eos);

  // The prompt for the model's next message; encode it with Tokenizer::encode(). Throws Error that
  // starts with `where`, also if it is not the model's turn.
  std::string prompt(const Conversation& conversation, const std::string& where) const;

  const ChatTemplate& chat_template() const { return template_; }
  const ChatTemplate& tool_template() const { return tool_template_; }  // with tools

  // Tokens that end a reply: `eos`, the tokenizer's end of document, and the first special token
  // that the template writes after a message of the assistant. Ascending.
  const std::vector<int32_t>& stop_tokens() const { return stop_tokens_; }

 private:
  ChatTemplate template_, tool_template_;
  std::vector<int32_t> stop_tokens_;
};

}  // namespace megatron
