#include "megatron/tokenizers/detail/bpe_tokenizer.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/byte_level.h"
#include "megatron/tokenizers/detail/normalizer.h"
#include "megatron/tokenizers/detail/utf8.h"

namespace megatron {
namespace {

std::atomic<uint64_t> next_instance{1};

using Ids = std::unordered_map<std::string, int32_t>;

// Turns spellings into bytes and merges into ids; `ids` gets every token of the vocabulary.
BpeData build_model(const BpeDefinition& definition, Ids& ids) {
  BpeData data;
  data.ignore_merges = definition.ignore_merges;
  data.fuse_unknown = definition.fuse_unk;
  data.byte_ids.fill(-1);
  int32_t size = 0;
  for (const auto& entry : definition.vocab) size = std::max(size, entry.second + 1);
  data.tokens.resize(static_cast<size_t>(size));
  data.is_word.resize(static_cast<size_t>(size));
  std::vector<bool> taken(static_cast<size_t>(size));
  ids.reserve(definition.vocab.size());
  std::string bytes;
  for (const auto& [token, id] : definition.vocab) {
    MEGATRON_CHECK(ids.emplace(token, id).second, definition.vocab_where, ": token \"", token,
                   "\" appears twice");
    MEGATRON_CHECK(!taken[id], definition.vocab_where, ": id ", id,
                   " is given to two tokens, one of them \"", token, "\"");
    taken[id] = true;
    data.is_word[id] = parse_byte_level(token, bytes) && !bytes.empty();
    data.tokens[id] = data.is_word[id] ? bytes : token;
    if (data.is_word[id] && bytes.size() == 1)
      data.byte_ids[static_cast<unsigned char>(bytes[0])] = id;
  }
  if (definition.unk_token) {
    const auto unknown = ids.find(*definition.unk_token);
    data.unknown = unknown == ids.end() ? -1 : unknown->second;
  }
  data.merges.reserve(definition.merges.size());
  const auto find = [&](const std::string& token) {
    const auto found = ids.find(token);
    MEGATRON_CHECK(found != ids.end(), definition.merges_where, ": merge ", data.merges.size(),
                   " (\"", definition.merges[data.merges.size()].first, "\", \"",
                   definition.merges[data.merges.size()].second, "\") needs the token \"", token,
                   "\", which the vocabulary lacks");
    return found->second;
  };
  for (const auto& [left, right] : definition.merges) {
    data.merges.push_back({find(left), find(right), find(left + right)});
  }
  return data;
}

std::unique_ptr<BpeModel> make_model(const BpeDefinition& definition, Ids& ids) {
  return std::make_unique<BpeModel>(build_model(definition, ids));
}

}  // namespace

// What a thread keeps between calls.
struct BpeTokenizer::ThreadState {
  uint64_t instance = 0;
  WordCache cache;
  BpeModel::Scratch bpe;
  PreTokenizer::Scratch pieces;
  std::string repaired, normalized;
};

BpeTokenizer::BpeTokenizer(std::string_view type, const BpeDefinition& definition)
    : instance_(next_instance.fetch_add(1)),
      model_(make_model(definition, ids_)),
      pre_tokenizer_(definition.steps, definition.steps_where),
      nfc_(definition.nfc),
      files_(definition.files) {
  bytes_ = model_->data().tokens;
  add_tokens(definition);
  MEGATRON_CHECK(!bytes_.empty(), definition.vocab_where, " is empty");
  find_special_ids(definition);
  fingerprint_ = make_fingerprint(type, definition);
}

void BpeTokenizer::add_tokens(const BpeDefinition& definition) {
  std::vector<bool> added(bytes_.size());
  std::vector<bool> taken(bytes_.size());
  for (const auto& entry : definition.vocab) taken[entry.second] = true;
  special_.resize(bytes_.size());
  std::vector<AddedToken> raw, normalized;
  std::vector<std::string> raw_contents, normalized_contents;
  std::string buffer;
  for (size_t i = 0; i < definition.added_tokens.size(); ++i) {
    const AddedToken& token = definition.added_tokens[i];
    const auto where = [&] {
      return cat(definition.added_where, "[", i, "] \"", token.content, "\"");
    };
    if (token.content.empty()) continue;  // as the tokenizers package does
    const auto id = static_cast<size_t>(token.id);
    const auto [known, is_new] = ids_.emplace(token.content, token.id);
    MEGATRON_CHECK(known->second == token.id, where(), " has id ", token.id,
                   ", but the same token has id ", known->second, " already");
    MEGATRON_CHECK(!is_new || id >= taken.size() || !taken[id], where(), " has id ", token.id,
                   ", which another token has already");
    if (id >= bytes_.size()) {
      bytes_.resize(id + 1);
      special_.resize(id + 1);
      taken.resize(id + 1);
      added.resize(id + 1);
    }
    MEGATRON_CHECK(!added[id], where(), " appears twice");
    added[id] = taken[id] = true;
    special_[id] = token.special;
    const bool normalize = token.normalized && nfc_;
    const std::string content(normalize ? to_nfc(token.content, buffer)
                                        : std::string_view(token.content));
    if (!parse_byte_level(content, bytes_[id])) bytes_[id] = content;
    (token.normalized ? normalized : raw).push_back(token);
    (token.normalized ? normalized_contents : raw_contents).push_back(content);
  }
  raw_matcher_ = AddedTokenMatcher(std::move(raw), raw_contents);
  normalized_matcher_ = AddedTokenMatcher(std::move(normalized), normalized_contents);
}

// The tokens that tokenizer_config.json names; without it, well-known spellings among the special
// tokens.
void BpeTokenizer::find_special_ids(const BpeDefinition& definition) {
  const auto choose = [&](const std::optional<std::string>& named,
                          std::initializer_list<const char*> usual) -> std::optional<int32_t> {
    if (named) {
      const auto id = token_to_id(*named);
      MEGATRON_CHECK(id.has_value(), definition.files.back().string(), ": token \"", *named,
                     "\" is not in the vocabulary");
      return id;
    }
    for (const char* name : usual) {
      const auto id = token_to_id(name);
      if (id && is_special(*id)) return id;
    }
    return std::nullopt;
  };
  eod_ = choose(definition.eos, {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"});
  bos_ = choose(definition.bos, {"<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>"});
  pad_ = choose(definition.pad, {"<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"});
}

std::string BpeTokenizer::make_fingerprint(std::string_view type,
                                           const BpeDefinition& definition) const {
  std::string text;
  const auto number = [&](int64_t value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const auto string = [&](std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    text += value;
  };
  for (const std::string& token : model_->data().tokens) string(token);
  for (const BpeData::Merge& merge : model_->data().merges) {
    number(merge.left);
    number(merge.right);
    number(merge.result);
  }
  number(model_->data().ignore_merges);
  number(model_->data().unknown);
  number(model_->data().fuse_unknown);
  number(nfc_);
  for (const PreTokenizerStep& step : pre_tokenizer_.steps()) {
    number(static_cast<int>(step.kind));
    string(step.pattern);
    number(static_cast<int>(step.behavior));
    number(step.invert);
  }
  for (const AddedToken& token : definition.added_tokens) {
    number(token.id);
    string(token.content);
    number(token.single_word | token.lstrip << 1 | token.rstrip << 2 | token.normalized << 3);
  }
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  char digits[33];
  std::snprintf(digits, sizeof(digits), "%016llx%016llx",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return cat(type, "-", digits);
}

BpeTokenizer::ThreadState& BpeTokenizer::thread_state() const {
  thread_local std::array<std::unique_ptr<ThreadState>, 2> states;
  if (states[0] == nullptr || states[0]->instance != instance_) {
    states[0].swap(states[1]);
    if (states[0] == nullptr || states[0]->instance != instance_) {
      states[0] = std::make_unique<ThreadState>();
      states[0]->instance = instance_;
    }
  }
  return *states[0];
}

void BpeTokenizer::encode_append(std::string_view text, std::vector<int32_t>& out) const {
  ThreadState& state = thread_state();
  if (valid_utf8_prefix(text) != text.size()) {
    state.repaired.clear();
    num_replaced_.fetch_add(append_repaired_utf8(text, state.repaired), std::memory_order_relaxed);
    text = state.repaired;
  }
  WordEncoder words(*model_, state.cache, state.bpe, out);
  const auto segment = [&](std::string_view part) { encode_segment(part, state, words, out); };
  if (raw_matcher_.empty()) {
    segment(text);
  } else {
    raw_matcher_.split(text, segment, [&](int32_t id) { out.push_back(id); });
  }
}

// Appends the ids of text that holds no added token of the raw kind.
void BpeTokenizer::encode_segment(std::string_view text, ThreadState& state, WordEncoder& words,
                                  std::vector<int32_t>& out) const {
  if (nfc_) text = to_nfc(text, state.normalized);
  const auto encode = [&](std::string_view part) {
    bool first = true;
    pre_tokenizer_.split(part, state.pieces, [&](const char* begin, const char* end) {
      if (first) {
        const bool moved = begin < part.data() || begin >= part.data() + part.size();
        words.set_readable_end(moved ? state.pieces.text.data() + state.pieces.text.size()
                                     : text.data() + text.size());
        first = false;
      }
      words(begin, end);
    });
    words.flush();
  };
  if (normalized_matcher_.empty()) {
    encode(text);
  } else {
    normalized_matcher_.split(text, encode, [&](int32_t id) { out.push_back(id); });
  }
}

void BpeTokenizer::check_id(int32_t id) const {
  MEGATRON_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                 vocab_size());
}

std::string BpeTokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string bytes;
  for (const int32_t id : ids) {
    check_id(id);
    if (!(skip_special_tokens && special_[id])) bytes += bytes_[id];
  }
  if (valid_utf8_prefix(bytes) == bytes.size()) return bytes;
  std::string text;
  append_repaired_utf8(bytes, text);
  return text;
}

std::string BpeTokenizer::token_bytes(int32_t id) const {
  check_id(id);
  return bytes_[id];
}

bool BpeTokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[id];
}

std::optional<int32_t> BpeTokenizer::token_to_id(std::string_view token) const {
  const auto found = ids_.find(std::string(token));
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

}  // namespace megatron
