// Preference pairs from JSON lines, as token ids.
//
// One object per line (files may be compressed with gzip or zstd), in one of the forms
//
//   {"prompt": "text", "chosen": "text", "rejected": "text"}
//   {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
//   {"chosen": [messages], "rejected": [messages]}      the common first messages are the prompt
//
// Texts are encoded unchanged, prompt and response separately, and the end-of-document token is
// appended to a response. Messages, objects with "role" and "content", are rendered by the chat
// template: the prompt with the generation prompt appended; the response is what the rendered
// conversation has after that. Other members of an object ("score", ...) are ignored.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "megatron/datasets/tuning/preference_dataset.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct PreferenceOptions {
  int64_t sequence_length = 0;
  // Renders a conversation (a JSON list of messages). Null: lines with messages are refused.
  std::function<std::string(const std::string& messages, bool add_generation_prompt)> render;
};

struct PreferenceFile {
  std::vector<PreferencePair> pairs;
  // Skipped pairs: prompt and response have more than sequence_length + 1 tokens.
  int64_t num_long = 0;
};

// Throws Error naming file and line for objects of another form.
PreferenceFile read_preferences(const std::string& path, const Tokenizer& tokenizer,
                                const PreferenceOptions& options);

}  // namespace megatron
