#include "megatron/serving/detail/log_probability_json.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"

namespace megatron {
namespace {

void write_top(const PositionLogProbabilities& numbers, const Tokenizer& tokenizer, bool as_ids,
               JsonWriter& json) {
  json.begin_object();
  std::set<std::string> written;
  const auto write = [&](const TokenLogProbability& one) {
    const std::string text = token_text(tokenizer, one.id, as_ids);
    if (written.insert(text).second) json.member(text, json_log_probability(one.log_probability));
  };
  // The chosen token is among them, before others of the same text.
  write(numbers.chosen);
  for (const TokenLogProbability& one : numbers.top) write(one);
  json.end_object();
}

void write_token(const TokenLogProbability& one, const Tokenizer& tokenizer, bool as_ids,
                 JsonWriter& json) {
  json.member("token", token_text(tokenizer, one.id, as_ids))
      .member("logprob", json_log_probability(one.log_probability));
  json.key("bytes").begin_array();
  for (const char c : bytes_of(tokenizer, one.id)) json.value(static_cast<unsigned char>(c) + 0);
  json.end_array();
}

}  // namespace

double json_log_probability(float value) {
  constexpr double kLeast = -9999.0;
  return std::isnan(value) ? kLeast : std::max(kLeast, static_cast<double>(value));
}

std::string bytes_of(const Tokenizer& tokenizer, int32_t id) {
  return id < tokenizer.vocab_size() ? tokenizer.token_bytes(id) : std::string();
}

std::string text_of(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  std::vector<int32_t> known;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(known),
               [&](int32_t id) { return id < tokenizer.vocab_size(); });
  return tokenizer.decode(known);
}

std::string token_text(const Tokenizer& tokenizer, int32_t id, bool as_id) {
  if (as_id) return cat("token_id:", id);
  std::string bytes = bytes_of(tokenizer, id);
  if (is_valid_utf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char c : bytes) {
    char hex[8];
    std::snprintf(hex, sizeof hex, "\\x%02x", static_cast<unsigned char>(c));
    text += hex;
  }
  return text;
}

size_t characters_in(const Tokenizer& tokenizer, int32_t id) {
  const std::string bytes = bytes_of(tokenizer, id);
  return static_cast<size_t>(
      std::count_if(bytes.begin(), bytes.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

void ScoredTokens::add(std::span<const int32_t> prompt,
                       std::span<const PositionLogProbabilities> numbers) {
  const size_t unknown = prompt.size() - std::min(prompt.size(), numbers.size());
  for (size_t i = 0; i < prompt.size(); ++i)
    tokens.push_back({prompt[i], i < unknown ? nullptr : &numbers[i - unknown]});
}

void ScoredTokens::add(std::span<const GeneratedToken> generated) {
  for (const GeneratedToken& token : generated)
    tokens.push_back({token.id, token.log_probabilities ? &*token.log_probabilities : nullptr});
}

void write_completion_logprobs(const ScoredTokens& tokens, const Tokenizer& tokenizer, bool as_ids,
                               bool with_top, size_t& offset, JsonWriter& json) {
  json.begin_object().key("tokens").begin_array();
  for (const auto& one : tokens.tokens) json.value(token_text(tokenizer, one.id, as_ids));
  json.end_array().key("token_logprobs").begin_array();
  for (const auto& one : tokens.tokens) {
    if (one.numbers == nullptr)
      json.null();
    else
      json.value(json_log_probability(one.numbers->chosen.log_probability));
  }
  json.end_array().key("top_logprobs");
  if (with_top) {
    json.begin_array();
    for (const auto& one : tokens.tokens) {
      if (one.numbers == nullptr)
        json.null();
      else
        write_top(*one.numbers, tokenizer, as_ids, json);
    }
    json.end_array();
  } else {
    json.null();
  }
  json.key("text_offset").begin_array();
  for (const auto& one : tokens.tokens) {
    json.value(offset);
    offset += characters_in(tokenizer, one.id);
  }
  json.end_array().end_object();
}

void write_chat_logprobs(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer,
                         bool as_ids, JsonWriter& json) {
  json.begin_object().key("content").begin_array();
  for (const GeneratedToken& token : tokens) {
    if (!token.log_probabilities) continue;
    json.begin_object();
    write_token(token.log_probabilities->chosen, tokenizer, as_ids, json);
    json.key("top_logprobs").begin_array();
    for (const TokenLogProbability& one : token.log_probabilities->top) {
      json.begin_object();
      write_token(one, tokenizer, as_ids, json);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().key("refusal").null().end_object();
}

void write_prompt_logprobs(std::span<const int32_t> prompt,
                           std::span<const PositionLogProbabilities> numbers,
                           const Tokenizer& tokenizer, JsonWriter& json) {
  ScoredTokens scored;
  scored.add(prompt, numbers);
  json.begin_array();
  for (const auto& one : scored.tokens) {
    if (one.numbers == nullptr) {
      json.null();
      continue;
    }
    json.begin_object();
    std::set<int32_t> written;
    const auto write = [&](const TokenLogProbability& number) {
      if (!written.insert(number.id).second) return;
      const auto& top = one.numbers->top;
      const auto found = std::find_if(
          top.begin(), top.end(), [&](const TokenLogProbability& t) { return t.id == number.id; });
      json.key(std::to_string(number.id)).begin_object();
      json.member("logprob", json_log_probability(number.log_probability)).key("rank");
      found == top.end() ? json.null() : json.value(found - top.begin() + 1);
      json.member("decoded_token", token_text(tokenizer, number.id, false)).end_object();
    };
    write(one.numbers->chosen);
    for (const TokenLogProbability& number : one.numbers->top) write(number);
    json.end_object();
  }
  json.end_array();
}

}  // namespace megatron
