// Pairs of responses from JSON lines, as token ids.
//
// One object a line (gzip and zstd are read as they are), in one of the forms
//
//   {"prompt": "text", "chosen": "text", "rejected": "text"}
//   {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
//   {"chosen": [messages], "rejected": [messages]}      the messages that both begin with are the
//                                                       prompt
//
// Texts are encoded as they stand, prompt and response each by itself, and the end of document is
// put behind a response. Messages, objects with "role" and "content", are rendered by the chat
// template: the prompt with the opening of the model's turn, and what the whole conversation has
// behind that is the response. Other members of an object ("score", ...) are left alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "megatron/datasets/preference_dataset.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct PreferenceOptions {
  int64_t sequence_length = 0;
  // The text of a conversation (a JSON list of messages). Null: lines with messages are refused.
  std::function<std::string(const std::string& messages, bool add_generation_prompt)> render;
};

struct PreferenceFile {
  std::vector<PreferencePair> pairs;
  int64_t num_long = 0;  // pairs left out: prompt and response have more than sequence_length + 1
                         // tokens
};

// Throws Error naming file and line for what has another form.
PreferenceFile read_preferences(const std::string& path, const Tokenizer& tokenizer,
                                const PreferenceOptions& options);

}  // namespace megatron
