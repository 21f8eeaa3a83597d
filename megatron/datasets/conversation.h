// From rows of chat data to token ids, and which of them the assistant wrote.
//
// A row is a JSON object in one of these forms:
//   messages       [{"role": "user", "content": "..."}, ...], as the API of OpenAI has them (also
//   with tool_calls) conversations  [{"from": "human", "value": "..."}, ...], as ShareGPT has them
//   prompt, completion  two texts, or two lists of messages; the completion counts
//   instruction, input, output  as Alpaca has them (input may be empty or absent; also system): the
//   turns of a user, who says the instruction, an empty line and the input, and of the assistant
// and may have tools (a list of functions) and chat_template_kwargs (variables for the template).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/datasets/sft_config.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct Conversation {
  std::vector<std::string> messages;  // JSON objects; empty: prompt and completion are texts
  std::vector<bool> is_assistant;     // by message
  size_t first_completion = 0;        // messages before it belong to a prompt and never count
  std::string tools, variables;       // JSON; empty: none
  std::string prompt, completion;
};

// Throws Error that starts with `where` ("data.jsonl: line 7").
Conversation parse_conversation(std::string_view json, const std::string& where);

// Bytes [begin, end) of a text. What a token counts for at the end of a span is said by whoever
// marked it.
struct TextSpan {
  size_t begin = 0, end = 0;
  bool takes_last_token_whole = false;  // a token that reaches beyond `end` counts
};

struct RenderedConversation {
  std::string text;
  std::vector<TextSpan> trained;  // ascending
};

// The folder of a tokenizer's files, where its chat template may lie; empty: none.
std::filesystem::path tokenizer_folder(const TokenizerConfig& config);

// Thread safe. Keeps a reference to the tokenizer, which must outlive it.
class ConversationEncoder {
 public:
  // `folder` is where the tokenizer's files are. A template that is missing is an error only when a
  // row needs one.
  ConversationEncoder(const Tokenizer& tokenizer, const std::filesystem::path& folder,
                      const SftConfig& config);

  // The text of a conversation and what counts of it. Note [What the assistant wrote] in
  // conversation.cc. Throws Error.
  RenderedConversation render(const Conversation& conversation, const std::string& where) const;

  // Appends the ids of a conversation; those that do not count as ~id, which is negative. The text
  // of a prompt and completion is followed by the end-of-document token.
  void encode_append(const Conversation& conversation, const std::string& where,
                     std::vector<int32_t>& out) const;

  // Everything that ids and marks depend on, as one JSON object on one line.
  std::string description() const;

 private:
  std::vector<TextSpan> spans(const Conversation& conversation, const RenderedChat& chat,
                              const std::string& where) const;

  const Tokenizer& tokenizer_;
  std::optional<ChatTemplate> template_, tool_template_;
  std::string why_no_template_;
  SftLossOn loss_on_;
};

}  // namespace megatron
