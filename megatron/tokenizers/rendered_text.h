// Texts that chat templates made, for tokenizers that take no text for a special token: Mistral's
// tekken.json. There encode() reads "[INST]" as six characters, and only what a template wrote is
// the token. All other tokenizers find special tokens in every text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Divides the spelling of a special token that is ordinary text: private characters.
inline constexpr std::string_view kHidingMark = "\xEF\xA3\xBF\xEE\x80\x80\xEF\xA3\xBE";

// Whether encode() takes no text for a special token.
bool text_spells_no_special(const Tokenizer& tokenizer);

// The ids of such a text, with special tokens. Marks are removed, whatever the spellings that they
// divided are: their parts are encoded as one text.
std::vector<int32_t> encode_rendered(const Tokenizer& tokenizer, std::string_view text);

// JSON of messages or of what else a template takes, with marks in the special tokens that its
// texts spell; of other tokenizers the same. Throws Error if it is no JSON.
std::string hide_special_tokens(const Tokenizer& tokenizer, const std::string& json);

}  // namespace megatron
