// Converts rows of chat data to token ids, and marks those that the assistant wrote.
//
// A row is a JSON object in one of these forms:
//   messages                    [{"role": "user", "content": "..."}, ...], as in OpenAI's API (also
//                               with tool_calls)
//   conversations               [{"from": "human", "value": "..."}, ...], as in ShareGPT
//   prompt, completion          two texts, or two lists of messages; the completion is trained on
//   instruction, input, output  as in Alpaca (input may be empty or absent; also system): the turns
//                               of a user (instruction, an empty line, input) and of the assistant
// and may have tools (a list of functions) and chat_template_kwargs (variables for the template).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/datasets/tuning/sft_config.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct Conversation {
  std::vector<std::string> messages;  // JSON objects; empty: prompt and completion are texts
  std::vector<bool> is_assistant;     // by message
  size_t first_completion = 0;        // messages before it are the prompt, not trained on
  std::string tools, variables;       // JSON; empty: none
  std::string prompt, completion;
};

// Throws Error whose message starts with `where` ("data.jsonl: line 7").
Conversation parse_conversation(std::string_view json, const std::string& where);

// The same, whose texts spell no special token of a tokenizer that takes none from texts.
Conversation with_hidden_tokens(const Tokenizer& tokenizer, Conversation conversation);

// Bytes [begin, end) of a text that are trained on.
struct TextSpan {
  size_t begin = 0, end = 0;
  bool takes_last_token_whole = false;  // a token that extends beyond `end` is included
};

struct RenderedConversation {
  std::string text;
  std::vector<TextSpan> trained;  // ascending
};

// The folder of a tokenizer's files, which may contain its chat template; empty: none.
std::filesystem::path tokenizer_folder(const TokenizerConfig& config);

// Thread safe. Keeps a reference to the tokenizer, which must outlive it.
class ConversationEncoder {
 public:
  // `folder`: where the tokenizer's files are. A missing template is an error only if a row needs
  // one.
  ConversationEncoder(const Tokenizer& tokenizer, const std::filesystem::path& folder,
                      const SftConfig& config);

  // The text of a conversation and the spans that are trained on. Note [What the assistant wrote]
  // in conversation.cc. Throws Error.
  RenderedConversation render(const Conversation& conversation, const std::string& where) const;

  // Appends the ids of a conversation; those not trained on as ~id, which is negative. The text of
  // a prompt and completion is followed by the end-of-document token.
  void encode_append(const Conversation& conversation, const std::string& where,
                     std::vector<int32_t>& out) const;

  // Appends the ids of a rendered text in the same way.
  void encode_append(const RenderedConversation& rendered, std::vector<int32_t>& out) const;

  // Everything that ids and training spans depend on, as one JSON object on one line.
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
