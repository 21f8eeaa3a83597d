#include "megatron/datasets/masked/masked_tokens.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kMetaspaceMark = "\u2581", kByteLevelMark = "\u0120";

bool begins_word(const std::string& token) {
  return token.starts_with(kMetaspaceMark) || token.starts_with(kByteLevelMark);
}

void find_words(const Tokenizer& tokenizer, const std::vector<std::string>& spellings,
                MaskedTokens& out) {
  const std::string_view prefix = tokenizer.continuation_prefix();
  const bool marked = std::any_of(spellings.begin(), spellings.end(), begins_word);
  for (size_t id = 0; id < spellings.size(); ++id) {
    if (!prefix.empty()) {
      out.continues_word[id] = spellings[id].starts_with(prefix);
    } else if (marked) {
      out.ends_word[id] = tokenizer.is_special(static_cast<int32_t>(id));
      out.continues_word[id] = !out.ends_word[id] && !begins_word(spellings[id]);
    }
  }
}

}  // namespace

MaskedTokens masked_tokens(const Tokenizer& tokenizer, TokenizerIdentity identity) {
  MaskedTokens out;
  const auto id_of = [](std::optional<int32_t> id) { return int64_t{id.value_or(-1)}; };
  out.cls = id_of(tokenizer.cls());
  out.sep = id_of(tokenizer.sep());
  out.mask = id_of(tokenizer.mask());
  out.pad = id_of(tokenizer.pad());
  out.decoder_start = tokenizer.bos() ? *tokenizer.bos() : out.pad;
  out.eos = id_of(tokenizer.eod());
  while (const auto sentinel = tokenizer.token_to_id(cat("<extra_id_", out.sentinels.size(), ">")))
    out.sentinels.push_back(*sentinel);
  const auto wide = [](const std::vector<int32_t>& ids) {
    return std::vector<int64_t>(ids.begin(), ids.end());
  };
  out.prefix = wide(tokenizer.prefix_ids());
  out.suffix = wide(tokenizer.suffix_ids());
  out.vocab_size = tokenizer.vocab_size();
  const auto size = static_cast<size_t>(out.vocab_size);
  out.continues_word.resize(size);
  out.ends_word.resize(size);
  std::vector<std::string> spellings(size);
  for (size_t id = 0; id < size; ++id) {
    spellings[id] = tokenizer.id_to_token(static_cast<int32_t>(id));
    if (!spellings[id].empty()) out.replacements.push_back(static_cast<int64_t>(id));
  }
  find_words(tokenizer, spellings, out);
  out.identity = std::move(identity);
  return out;
}

MaskedTokens mock_masked_tokens(MaskedTokens tokens) {
  int64_t next = 0;
  for (int64_t* id : {&tokens.pad, &tokens.cls, &tokens.sep, &tokens.mask}) {
    if (*id < 0) *id = next;
    next = std::max(next, *id + 1);
  }
  if (tokens.decoder_start < 0) tokens.decoder_start = tokens.cls;
  if (tokens.eos < 0) tokens.eos = tokens.sep;
  if (!tokens.sentinels.empty()) return tokens;
  const int64_t end = tokens.vocab_size - (tokens.eos == tokens.vocab_size - 1 ? 1 : 0);
  tokens.sentinels.resize(static_cast<size_t>(std::min<int64_t>(100, tokens.vocab_size / 4)));
  std::iota(tokens.sentinels.rbegin(), tokens.sentinels.rend(),
            end - static_cast<int64_t>(tokens.sentinels.size()));
  return tokens;
}

}  // namespace megatron
