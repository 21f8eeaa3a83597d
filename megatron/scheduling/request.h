// A request for text and what comes back: what is asked, events, reasons why it ends.
//
// Positions of a sequence are counted from 0: first the given rows, then the ids of the prompt,
// then those that are generated. Ids are those of the tokenizer, below the vocabulary without
// padding. Times are nanoseconds of rank 0's monotonic clock; no other rank reads a clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/scheduling/token_grammar.h"

namespace megatron {

// Given by the engine, from 1, never twice in one process.
enum class RequestId : uint64_t {};

struct HeldRows;  // inference/images/held_rows.h

// Activations that stand in front of the prompt's ids, at the place of embeddings: those of images,
// of sound, of a soft prompt.
struct GivenRows {
  int64_t count = 0;
  int64_t width = 0;          // the model's hidden size
  std::vector<float> values;  // [count, width]; empty where `held` has them
  // [count]: so many leading rows each of them attends to, itself included and later ones too, as
  // where tokens of an image attend to all of it; not descending. Empty: none attends to later
  // ones.
  std::vector<int64_t> ends = {};
  // [count, 3]: the positions of each of them in time, of rows and of columns. Empty: they have one
  // each, from 0.
  std::vector<int64_t> positions = {};
  // [count]: the id of a token that the model looks up in the place of a row, -1: the row of
  // `values`. Empty: none is looked up.
  std::vector<int32_t> ids = {};
  // The values in memory of this process, where no other rank reads them; null: `values`
  std::shared_ptr<const HeldRows> held = {};

  // That of a row, or -1.
  int32_t id(int64_t row) const { return ids.empty() ? -1 : ids[static_cast<size_t>(row)]; }
  // Whether `first` rows attend to none behind them, so that they can be computed without those.
  bool stand_alone(int64_t first) const {
    return first <= 0 || first >= count || ends.empty() ||
           ends[static_cast<size_t>(first - 1)] <= first;
  }
  // Rows of the longest piece that cannot be divided.
  int64_t longest_piece() const;
  // The position of the first id behind them, from which on they count up: the largest plus one.
  int64_t next_position() const;
};

// What a model makes the fixed-size state of a request from, before its first position: an
// encoder's ids or features. Which of them, and their shape, is the model's to say.
struct StateInput {
  std::vector<int32_t> ids;
  std::vector<int64_t> shape;  // of `values`
  std::vector<float> values;
};

// How a token is drawn from the logits of one position, in this order: ids that are not allowed
// (forbidden ones, ends before min_tokens), logit_bias, penalties, the grammar's mask, temperature,
// top_k, top_p, min_p, draw. The draw is a function of (seed, choice, position, id) alone
// (docs/design/randomness.md).
struct SamplingParameters {
  double temperature = 1.0;  // 0: the largest logit, of equal ones that of the lowest id
  int32_t top_k = 0;         // that many of the largest, ties by id; 0: all
  double top_p = 1.0;        // the fewest whose probability reaches it, at least one; 1: all
  double min_p = 0.0;        // those of at least this times the largest probability; 0: all
  // Of ids that occur in the prompt or the output: positive logits are divided by it, others
  // multiplied.
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;   // subtracted once for an id that occurs in the output
  double frequency_penalty = 0.0;  // subtracted for each of its occurrences in the output
  std::vector<std::pair<int32_t, float>> logit_bias;  // ascending ids, each once
  std::vector<int32_t> forbidden;                     // ids that are never drawn
  uint64_t seed = 0;

  bool operator==(const SamplingParameters&) const = default;
};

constexpr int32_t kMaxTopLogProbabilities = 20;

// Which natural logarithms of probabilities are reported. The chosen token's number and that of the
// same token among the top ones are the same bits.
struct LogProbabilityWishes {
  int32_t output_top = -1;  // per generated token; -1: none, 0: of the chosen token, k: and the top
                            // k, at most kMaxTopLogProbabilities
  int32_t prompt_top = -1;  // the same per token of the prompt
  // First token of the prompt (an index of RequestSpec::prompt) that is reported; nothing is known
  // of one at position 0. Cached prefixes are read only up to it.
  int64_t prompt_from = 0;
  // Of the distribution that the token was drawn from, after all of SamplingParameters; false: of
  // the model's logits. Those of the prompt are always the model's.
  bool processed = false;

  bool operator==(const LogProbabilityWishes&) const = default;
};

struct StopConditions {
  // Tokens to generate, at least 1; 0 (with prompt log-probabilities): the prompt alone is scored.
  int64_t max_tokens = 16;
  int64_t min_tokens =
      0;  // none of the tokens below is drawn, and no text below looked for, before
  // Each ends the text and is not a part of it: the model's ends, then what the request asks for.
  std::vector<int32_t> end_tokens;
  std::vector<int32_t> stop_tokens;
  // The text ends before the first of these, wherever the borders of tokens lie; UTF-8, not empty.
  std::vector<std::string> stop_texts;
  bool include_stop_text = false;    // the text ends behind it instead
  bool skip_special_tokens = false;  // special tokens are generated, but not in the text

  bool operator==(const StopConditions&) const = default;
};

// All ids that end a text.
std::vector<int32_t> ends_of(const StopConditions& stop);

struct RequestSpec {
  std::shared_ptr<const GivenRows> rows;          // null: none
  std::vector<int32_t> prompt;                    // with `rows` may be empty
  std::shared_ptr<const StateInput> state_input;  // null: none
  SamplingParameters sampling;
  StopConditions stop;
  LogProbabilityWishes log_probabilities;
  int32_t choices = 1;       // independent texts of one prompt
  int32_t first_choice = 0;  // number of the first one in its draws
  int32_t priority = 0;      // lower runs earlier
  int64_t timeout_ns = 0;    // from submission to the last token; 0: none
  int32_t adapter = -1;      // index into the engine's list of adapters; -1: the model alone
  // Cached prefixes are shared among requests of equal salt only.
  std::string cache_salt;
  std::shared_ptr<const TokenGrammar> grammar;  // that each text follows; null: none
};

// Why a text ended; a closed set.
enum class FinishReason : uint8_t {
  kEndToken,       // one of end_tokens
  kStopToken,      // one of stop_tokens
  kStopText,       // one of stop_texts
  kLength,         // max_tokens
  kCancelled,      // by the client, or by pause(abort)
  kDeadline,       // timeout_ns
  kShutdown,       // the engine drained or stopped
  kNonFinite,      // the logits were not finite
  kGrammar,        // no token continues the grammar
  kInternalError,  // a rank or the device failed
};
// "end_token", "stop_token", ..., "internal_error"
std::string_view name(FinishReason reason);
// Whether the text is what was asked for.
constexpr bool is_complete(FinishReason reason) { return reason <= FinishReason::kLength; }
constexpr bool is_error(FinishReason reason) { return reason >= FinishReason::kNonFinite; }

struct TokenLogProbability {
  int32_t id = 0;
  float log_probability = 0.0f;
  bool operator==(const TokenLogProbability&) const = default;
};

// Log-probabilities at one position.
struct PositionLogProbabilities {
  TokenLogProbability chosen;
  std::vector<TokenLogProbability> top;  // falling; ties by id
  bool operator==(const PositionLogProbabilities&) const = default;
};

struct GeneratedToken {
  int32_t id = 0;
  int64_t weights_version = 0;  // of the weights that computed its logits
  std::optional<PositionLogProbabilities> log_probabilities;
};

// Counts of one choice.
struct Usage {
  int64_t prompt_tokens = 0;  // given rows included
  int64_t cached_tokens = 0;  // of those, read from the prefix cache when it was first scheduled
  int64_t output_tokens = 0;  // an end or stop token included
  int64_t preemptions = 0;
  // Drafts of next tokens that were computed; those of them that became tokens.
  int64_t drafts = 0, accepted_drafts = 0;
};

struct Finish {
  FinishReason reason = FinishReason::kLength;
  std::string stop_text;    // kStopText: which one
  int32_t stop_token = -1;  // kEndToken, kStopToken: which one
  std::string message;      // is_error(): what happened, one line
  Usage usage;
  // Nanoseconds from submission: to the first scheduling, the first token and the end; -1: did not
  // happen.
  int64_t queued_ns = -1, first_token_ns = -1, total_ns = -1;
};

// What happened to one choice in one step. Events of a choice come in order; the last one, and no
// other, has `finish`.
struct Event {
  RequestId request{};
  int32_t choice = 0;
  int64_t time_ns = 0;
  // New tokens, in order. Those that belong to a stop text, and an end or stop token, are among
  // them.
  std::vector<GeneratedToken> tokens;
  // Text that is final now: whole UTF-8 characters, and nothing that may still become part of a
  // stop text. The pieces of a choice concatenate to its text. Empty without a tokenizer.
  std::string text;
  // Of the prompt's tokens from prompt_from on; once, with the first event of choice 0.
  std::vector<PositionLogProbabilities> prompt_log_probabilities;
  std::optional<Finish> finish;
};

// Why a request was not taken.
struct Refusal {
  enum class Kind : uint8_t {
    kInvalid,      // never possible: a value is out of its range or too long for the model
    kQueueFull,    // possible later
    kUnavailable,  // the engine's state takes no requests
  };
  Kind kind = Kind::kInvalid;
  std::string member;  // of RequestSpec, as the OpenAI API spells it: "prompt", "max_tokens", ...
  std::string message;
  int64_t retry_after_ns = 0;  // 0: not known, or never
};

struct Admission {
  std::optional<RequestId> id;
  std::optional<Refusal> refusal;  // exactly one of the two
};

// What a request may ask of a model and a cache.
struct RequestLimits {
  int64_t vocab_size = 0;     // without padding
  int64_t max_positions = 0;  // of a sequence: the model's, or what the whole cache holds
  int64_t hidden_size = 0;    // of given rows; 0: the model takes none
  int64_t most_together = 0;  // rows that a step has room for beside all sequences; 0: not limited
  bool takes_state_input = false, needs_state_input = false;
  int32_t num_adapters = 0;
  int32_t max_choices = 16;
  int32_t max_stop_texts = 64;
  int64_t max_stop_text_bytes = 256;
  int32_t max_logit_bias = 1024;
};

// The first thing in `spec` that is out of range, of kind kInvalid; null: nothing.
std::optional<Refusal> check_request(const RequestSpec& spec, const RequestLimits& limits);

// Given rows and ids of the prompt.
inline int64_t prompt_positions(const RequestSpec& spec) {
  return (spec.rows ? spec.rows->count : 0) + static_cast<int64_t>(spec.prompt.size());
}

}  // namespace megatron
