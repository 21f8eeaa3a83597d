// Log-probabilities in the shapes of the OpenAI API.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "megatron/base/json_writer.h"
#include "megatron/scheduling/request.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Models may have ids that their tokenizer lacks; those have no text.
std::string bytes_of(const Tokenizer& tokenizer, int32_t id);
std::string text_of(const Tokenizer& tokenizer, std::span<const int32_t> ids);

// A token as text: its characters; "bytes:\xe4..." where it has parts of some; "token_id:5" if
// `as_id`.
std::string token_text(const Tokenizer& tokenizer, int32_t id, bool as_id);

// Characters that begin within a token.
size_t characters_in(const Tokenizer& tokenizer, int32_t id);

// Tokens with their numbers, in order.
struct ScoredTokens {
  struct One {
    int32_t id = 0;
    const PositionLogProbabilities* numbers = nullptr;  // null: the first of a text
  };
  std::vector<One> tokens;
  void add(std::span<const int32_t> prompt, std::span<const PositionLogProbabilities> numbers);
  void add(std::span<const GeneratedToken> generated);
};

// {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of completions. `offset`: of the
// first token in the text, in characters; becomes that behind the last.
void write_completion_logprobs(const ScoredTokens& tokens, const Tokenizer& tokenizer, bool as_ids,
                               bool with_top, size_t& offset, JsonWriter& json);

// {"content": [...]} of conversations.
void write_chat_logprobs(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer,
                         bool as_ids, JsonWriter& json);

// [null, {"5": {"logprob", "rank", "decoded_token"}}, ...]
void write_prompt_logprobs(std::span<const int32_t> prompt,
                           std::span<const PositionLogProbabilities> numbers,
                           const Tokenizer& tokenizer, JsonWriter& json);

// A number that JSON can hold: minus infinity is -9999, as elsewhere.
double json_log_probability(float value);

}  // namespace megatron
