// Conversations with a model: messages become a prompt by the tokenizer's chat template, and the
// tokens that end a turn end the reply.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/conversation.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// One turn as a JSON object.
std::string chat_message(std::string_view role, std::string_view content);

class Chat {
 public:
  // `folder`: of the tokenizer's files; `chat_template`: a file or the template itself, empty: the
  // tokenizer's. `eos`: ids that the model's generation_config.json or config.json ends texts with.
  // Throws Error when there is no template.
  Chat(const Tokenizer& tokenizer, const std::filesystem::path& folder,
       const std::string& chat_template, std::span<const int32_t> eos);

  // The text that asks the model for the next message; its ids are those of Tokenizer::encode().
  // Throws Error that starts with `where`, also when it is not the model's turn.
  std::string prompt(const Conversation& conversation, const std::string& where) const;

  // What ends a reply: `eos`, the tokenizer's end of document, and the first special token that the
  // template writes behind a message of the assistant. Ascending.
  const std::vector<int32_t>& stop_tokens() const { return stop_tokens_; }

 private:
  ChatTemplate template_, tool_template_;
  std::vector<int32_t> stop_tokens_;
};

}  // namespace megatron
