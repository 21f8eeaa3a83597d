#include "megatron/scheduling/request.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"

namespace megatron {

int64_t GivenRows::longest_piece() const {
  int64_t longest = 1;
  for (int64_t first = 0, i = 1; i <= count; ++i)
    if (stand_alone(i)) {
      longest = std::max(longest, i - first);
      first = i;
    }
  return longest;
}

int64_t GivenRows::next_position() const {
  return positions.empty() ? count : *std::ranges::max_element(positions) + 1;
}

namespace {

using Found = std::optional<Refusal>;

Found invalid(std::string member, std::string message) {
  return Refusal{Refusal::Kind::kInvalid, std::move(member), std::move(message), 0};
}

Found check_ids(const char* member, const char* what, const std::vector<int32_t>& ids,
                int64_t vocab_size) {
  for (const int32_t id : ids)
    if (id < 0 || id >= vocab_size)
      return invalid(member,
                     cat(what, " ", id, " is outside the vocabulary, 0 to ", vocab_size - 1));
  return {};
}

Found check_range(const char* member, double value, double low, double high) {
  if (value >= low && value <= high) return {};  // false for NaN
  return invalid(member, cat(member, " ", value, " is outside [", low, ", ", high, "]"));
}

Found check_count(const char* member, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return invalid(member, cat(member, " ", value, " is outside [", low, ", ", high, "]"));
}

Found check_ends(const GivenRows& rows, int64_t most_together) {
  if (rows.ends.empty()) return {};
  bool fits = std::ssize(rows.ends) == rows.count;
  for (int64_t i = 0; fits && i < rows.count; ++i) {
    const int64_t end = rows.ends[static_cast<size_t>(i)];
    fits = end > i && end <= rows.count && (i == 0 || end >= rows.ends[static_cast<size_t>(i - 1)]);
  }
  if (!fits)
    return invalid("rows", "the ends of given rows are not ascending numbers of leading rows");
  if (const int64_t longest = rows.longest_piece(); most_together > 0 && longest > most_together)
    return invalid("rows", cat(longest, " given rows attend to each other, a step has room for ",
                               most_together,
                               " beside other requests; --inference-dynamic-batching-max-tokens "
                               "says how many"));
  return {};
}

Found check_positions(const GivenRows& rows) {
  constexpr int64_t kAxes = 3;
  const auto& all = rows.positions;
  if (all.empty() || (std::ssize(all) == kAxes * rows.count && std::ranges::min(all) >= 0))
    return {};
  return invalid("rows", cat("given rows have ", all.size(), " positions, the least ",
                             std::ranges::min(all), "; expected three of each row, none negative"));
}

Found check_row_ids(const GivenRows& rows, int64_t vocab_size) {
  if (rows.ids.empty()) return {};
  if (std::ssize(rows.ids) != rows.count)
    return invalid("rows", cat(rows.count, " given rows have ", rows.ids.size(), " ids"));
  for (const int32_t id : rows.ids)
    if (id < -1 || id >= vocab_size)
      return invalid("rows", cat("token id ", id, " among given rows is outside the vocabulary, 0 ",
                                 "to ", vocab_size - 1));
  return {};
}

Found check_inputs(const RequestSpec& spec, const RequestLimits& limits) {
  if (spec.rows) {
    const GivenRows& rows = *spec.rows;
    if (limits.hidden_size == 0)
      return invalid("rows", "the model takes token ids alone, no given rows");
    if (rows.count < 1 || rows.width != limits.hidden_size ||
        (rows.held == nullptr &&
         static_cast<int64_t>(rows.values.size()) != rows.count * rows.width))
      return invalid("rows",
                     cat("given rows have the shape [", rows.count, ", ", rows.width, "] and ",
                         rows.values.size(), " values; expected rows of ", limits.hidden_size));
    if (Found found = check_ends(rows, limits.most_together)) return found;
    if (Found found = check_positions(rows)) return found;
    if (Found found = check_row_ids(rows, limits.vocab_size)) return found;
  }
  if (spec.state_input && !limits.takes_state_input)
    return invalid("state_input", "the model makes no state from an input");
  if (!spec.state_input && limits.needs_state_input)
    return invalid("state_input", "the model needs an input to make its state from");
  if (prompt_positions(spec) == 0) return invalid("prompt", "the prompt has no tokens");
  return check_ids("prompt", "token id", spec.prompt, limits.vocab_size);
}

Found check_lengths(const RequestSpec& spec, const RequestLimits& limits) {
  const StopConditions& stop = spec.stop;
  const int64_t prompt = prompt_positions(spec);
  const bool scores = spec.log_probabilities.prompt_top >= 0;
  if (stop.max_tokens < (scores ? 0 : 1))
    return invalid("max_tokens", cat("max_tokens ", stop.max_tokens, " is below ", scores ? 0 : 1));
  if (prompt > limits.max_positions)
    return invalid("prompt", cat("the prompt has ", prompt, " tokens, the model's context is ",
                                 limits.max_positions));
  if (stop.max_tokens > limits.max_positions - prompt)
    return invalid("max_tokens",
                   cat("max_tokens ", stop.max_tokens, " and the prompt's ", prompt,
                       " tokens are beyond the model's context of ", limits.max_positions,
                       "; at most ", limits.max_positions - prompt, " can be generated"));
  return check_count("min_tokens", stop.min_tokens, 0, stop.max_tokens);
}

Found check_stops(const StopConditions& stop, const RequestLimits& limits) {
  if (auto found = check_ids("stop_token_ids", "stop token", stop.stop_tokens, limits.vocab_size))
    return found;
  if (auto found = check_ids("stop_token_ids", "end token", stop.end_tokens, limits.vocab_size))
    return found;
  if (static_cast<int64_t>(stop.stop_texts.size()) > limits.max_stop_texts)
    return invalid("stop", cat(stop.stop_texts.size(), " stop texts were given, at most ",
                               limits.max_stop_texts, " are taken"));
  for (const std::string& text : stop.stop_texts) {
    if (text.empty()) return invalid("stop", "a stop text is empty");
    if (static_cast<int64_t>(text.size()) > limits.max_stop_text_bytes)
      return invalid("stop", cat("a stop text has ", text.size(), " bytes, at most ",
                                 limits.max_stop_text_bytes, " are taken"));
    if (!is_valid_utf8(text)) return invalid("stop", "a stop text is not valid UTF-8");
  }
  return {};
}

Found check_bias(const SamplingParameters& sampling, const RequestLimits& limits) {
  if (static_cast<int64_t>(sampling.logit_bias.size()) > limits.max_logit_bias)
    return invalid("logit_bias", cat("logit_bias has ", sampling.logit_bias.size(),
                                     " entries, at most ", limits.max_logit_bias, " are taken"));
  int32_t last = -1;
  for (const auto& [id, bias] : sampling.logit_bias) {
    if (auto found = check_ids("logit_bias", "token id", {id}, limits.vocab_size)) return found;
    if (id <= last) return invalid("logit_bias", cat("token id ", id, " is not above ", last));
    if (auto found = check_range("logit_bias", static_cast<double>(bias), -100.0, 100.0))
      return found;
    last = id;
  }
  if (auto found = check_ids("forbidden", "token id", sampling.forbidden, limits.vocab_size))
    return found;
  if (static_cast<int64_t>(sampling.forbidden.size()) >= limits.vocab_size)
    return invalid("forbidden", "as many token ids are forbidden as there are");
  return {};
}

Found check_sampling(const SamplingParameters& sampling, const RequestLimits& limits) {
  if (auto found = check_range("temperature", sampling.temperature, 0.0, 100.0)) return found;
  if (auto found = check_count("top_k", sampling.top_k, 0, INT32_MAX)) return found;
  if (!(sampling.top_p > 0.0 && sampling.top_p <= 1.0))
    return invalid("top_p", cat("top_p ", sampling.top_p, " is outside (0, 1]"));
  if (auto found = check_range("min_p", sampling.min_p, 0.0, 1.0)) return found;
  if (!(sampling.repetition_penalty > 0.0 && sampling.repetition_penalty <= 100.0))
    return invalid("repetition_penalty",
                   cat("repetition_penalty ", sampling.repetition_penalty, " is outside (0, 100]"));
  if (auto found = check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0))
    return found;
  if (auto found = check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0))
    return found;
  return check_bias(sampling, limits);
}

Found check_wishes(const RequestSpec& spec) {
  const LogProbabilityWishes& wishes = spec.log_probabilities;
  if (auto found = check_count("top_logprobs", wishes.output_top, -1, kMaxTopLogProbabilities))
    return found;
  if (auto found = check_count("prompt_logprobs", wishes.prompt_top, -1, kMaxTopLogProbabilities))
    return found;
  return check_count("prompt_logprobs", wishes.prompt_from, 0,
                     static_cast<int64_t>(spec.prompt.size()));
}

}  // namespace

std::vector<int32_t> ends_of(const StopConditions& stop) {
  std::vector<int32_t> ends = stop.end_tokens;
  ends.insert(ends.end(), stop.stop_tokens.begin(), stop.stop_tokens.end());
  return ends;
}

std::string_view name(FinishReason reason) {
  static constexpr std::array<std::string_view, 10> kNames = {
      "end_token", "stop_token", "stop_text",  "length",  "cancelled",
      "deadline",  "shutdown",   "non_finite", "grammar", "internal_error"};
  return kNames.at(static_cast<size_t>(reason));
}

std::optional<Refusal> check_request(const RequestSpec& spec, const RequestLimits& limits) {
  if (auto found = check_inputs(spec, limits)) return found;
  if (auto found = check_lengths(spec, limits)) return found;
  if (auto found = check_stops(spec.stop, limits)) return found;
  if (auto found = check_sampling(spec.sampling, limits)) return found;
  if (auto found = check_wishes(spec)) return found;
  if (auto found = check_count("n", spec.choices, 1, limits.max_choices)) return found;
  if (auto found = check_count("timeout", spec.timeout_ns, 0, INT64_MAX)) return found;
  if (spec.adapter < -1 || spec.adapter >= limits.num_adapters)
    return invalid("model", cat("adapter ", spec.adapter, " is not one of the ",
                                limits.num_adapters, " that were loaded"));
  return {};
}

}  // namespace megatron
