// What the server knows of the model that the engine runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/scheduling/request.h"
#include "megatron/serving/media_prompts.h"
#include "megatron/serving/tool_calls.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Of an encoder-decoder, whose encoder reads the prompts.
struct EncoderPrompts {
  int32_t decoder_start = 0;   // what its texts begin with
  std::optional<int32_t> end;  // what ends a prompt that is a text; none: nothing
  int64_t max_tokens = 0;      // of a prompt, with its end
};

struct ServedModel {
  std::string name;                   // in "model"
  std::vector<std::string> adapters;  // further names, by the index of RequestSpec::adapter
  int64_t created = 0;                // seconds since 1970
  const Tokenizer* tokenizer = nullptr;
  // Null: none. The second is for conversations with tools, and may be the first.
  const ChatTemplate* chat_template = nullptr;
  const ChatTemplate* tool_template = nullptr;
  std::string why_no_template;  // where there is none
  ToolFormat tool_format = ToolFormat::kNone;
  // Ends of a text, and of a turn of a conversation.
  std::vector<int32_t> end_tokens, chat_end_tokens;
  std::optional<EncoderPrompts> encoder;  // none: texts continue their prompts
  GrammarSource* grammars = nullptr;      // null: the engine follows none
  MediaPrompts* media = nullptr;          // null: the model reads text alone
  RequestLimits limits;                   // of the engine, for requests
};

}  // namespace megatron
