#include "megatron/tokenizers/detail/bpe_model.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Up to this many symbols a linear search for the best pair is faster than a heap.
constexpr size_t kMaxShortSymbols = 40;

// Unknown characters of SentencePiece models during merging: negative ids, never -1.
int32_t unknown_symbol(uint32_t character) { return -static_cast<int32_t>(character) - 2; }
uint32_t unknown_character(int32_t id) { return static_cast<uint32_t>(-(id + 2)); }

}  // namespace

BpeModel::BpeModel(BpeData data) : data_(std::move(data)) {
  const size_t slots = std::bit_ceil(std::max<size_t>(16, data_.merges.size() * 2));
  slots_.assign(slots, Slot{kEmptyPair, 0, 0});
  mask_ = slots - 1;
  shift_ = 64 - std::countr_zero(slots);
  for (const BpeData::Merge& merge : data_.merges) insert_merge(merge);
  const bool affixed = !data_.prefix.empty() || !data_.suffix.empty();
  if (data_.ignore_merges || affixed) {
    words_.reserve(data_.tokens.size());
    for (size_t id = 0; id < data_.tokens.size(); ++id) {
      if (data_.is_word[id]) words_.emplace(data_.tokens[id], static_cast<int32_t>(id));
    }
  }
  if (data_.symbols == BpeData::Symbols::kBytes) return;
  index_characters();
  if (!affixed && !data_.ignore_merges) cutter_ = make_cutter();
}

// Of equal pairs the last one counts, as in the `tokenizers` package.
void BpeModel::insert_merge(const BpeData::Merge& merge) {
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(merge.left)) << 32 |
                        static_cast<uint32_t>(merge.right);
  uint64_t at = (pair * 0x9e3779b97f4a7c15u) >> shift_;
  while (slots_[at].pair != kEmptyPair && slots_[at].pair != pair) at = (at + 1) & mask_;
  slots_[at] = {pair, merge.rank, merge.result};
}

void BpeModel::index_characters() {
  character_ids_.assign(0x110000, -1);
  for (size_t id = 0; id < data_.tokens.size(); ++id) {
    const std::string& token = data_.tokens[id];
    size_t length;
    if (token.empty() || !data_.is_word[id]) continue;
    const uint32_t c = decode_utf8(token.data(), length);
    if (length == token.size()) character_ids_[c] = static_cast<int32_t>(id);
  }
}

// A merge spans a split if its right half starts with the mark. If text may spell the mark in
// bytes, or the mark is unknown, runs of unknown characters would also span it.
MetaspaceCutter BpeModel::make_cutter() const {
  MetaspaceCutter cutter;
  if (character_ids_[kMetaspaceCharacter] < 0) return cutter;
  cutter.enable();
  std::vector<bool> is_byte(data_.tokens.size());
  for (const int32_t id : data_.byte_ids) {
    if (id >= 0) is_byte[id] = true;
  }
  for (const BpeData::Merge& merge : data_.merges) {
    if (!data_.tokens[merge.right].starts_with(kMetaspace)) continue;
    const std::string& left = data_.tokens[merge.left];
    if (is_byte[merge.left] || left.empty()) {
      cutter.disable();
    } else {
      size_t length;
      cutter.add_joined(decode_utf8(previous_utf8(left.data() + left.size()), length));
    }
  }
  return cutter;
}

void BpeModel::initial_bytes(std::string_view word, std::vector<int32_t>& ids) const {
  ids.clear();
  bool unknown_before = false;
  for (const char c : word) {
    const int32_t id = data_.byte_ids[static_cast<unsigned char>(c)];
    if (id < 0) {
      MEGATRON_CHECK(data_.unknown >= 0, "the tokenizer's vocabulary has no token for byte ",
                     static_cast<int>(static_cast<unsigned char>(c)), " and no unk_token");
      if (!unknown_before || !data_.fuse_unknown) ids.push_back(data_.unknown);
    } else {
      ids.push_back(id);
    }
    unknown_before = id < 0;
  }
}

// The id of a character at its position in the word, -1 if there is none; `spelled`: the symbol
// that was looked up, with its affixes.
int32_t BpeModel::symbol(std::string_view character, bool first, bool last,
                         std::string_view& spelled, std::string& buffer) const {
  spelled = character;
  const bool prefixed = !first && !data_.prefix.empty();
  const bool suffixed = last && !data_.suffix.empty();
  if (!prefixed && !suffixed) {
    size_t length;
    return character_ids_[decode_utf8(character.data(), length)];
  }
  buffer.assign(prefixed ? data_.prefix : std::string());
  buffer += character;
  if (suffixed) buffer += data_.suffix;
  spelled = buffer;
  const auto found = words_.find(spelled);
  return found == words_.end() ? -1 : found->second;
}

// An unknown character is held back until a known one follows it, as in the package.
void BpeModel::initial_characters(std::string_view word, ModelScratch& s) const {
  s.ids.clear();
  bool held = false;
  size_t length;
  for (size_t at = 0; at < word.size(); at += length) {
    decode_utf8(word.data() + at, length);
    const std::string_view character = word.substr(at, length);
    std::string_view spelled;
    const int32_t id = symbol(character, at == 0, at + length == word.size(), spelled, s.text);
    if (id >= 0) {
      if (held) s.ids.push_back(data_.unknown);
      held = false;
      s.ids.push_back(id);
      continue;
    }
    if (data_.byte_fallback) {
      const bool all = std::all_of(spelled.begin(), spelled.end(), [&](char c) {
        return data_.byte_ids[static_cast<unsigned char>(c)] >= 0;
      });
      if (all) {
        for (const char c : spelled) s.ids.push_back(data_.byte_ids[static_cast<unsigned char>(c)]);
        continue;
      }
    }
    MEGATRON_CHECK(data_.unknown >= 0, "the tokenizer's vocabulary has no token for \"", character,
                   "\" and no unk_token");
    if (held && !data_.fuse_unknown) s.ids.push_back(data_.unknown);
    held = true;
  }
  if (held) s.ids.push_back(data_.unknown);
}

void BpeModel::initial_pieces(std::string_view word, std::vector<int32_t>& ids) const {
  ids.clear();
  size_t length;
  for (size_t at = 0; at < word.size(); at += length) {
    const uint32_t c = decode_utf8(word.data() + at, length);
    ids.push_back(character_ids_[c] >= 0 ? character_ids_[c] : unknown_symbol(c));
  }
}

void BpeModel::encode_word(std::string_view word, ModelScratch& scratch,
                           std::vector<int32_t>& out) const {
  if (data_.ignore_merges) {
    const auto found = words_.find(word);
    if (found != words_.end()) {
      out.push_back(found->second);
      return;
    }
  }
  switch (data_.symbols) {
    case BpeData::Symbols::kBytes:
      initial_bytes(word, scratch.ids);
      break;
    case BpeData::Symbols::kCharacters:
      initial_characters(word, scratch);
      break;
    case BpeData::Symbols::kPieces:
      initial_pieces(word, scratch.ids);
  }
  const size_t before = out.size();
  if (scratch.ids.size() <= kMaxShortSymbols) {
    merge_short(scratch.ids.data(), scratch.ids.size(), out);
  } else {
    merge_long(scratch, out);
  }
  if (data_.symbols == BpeData::Symbols::kPieces) replace_unknown_pieces(before, scratch, out);
}

// Symbols that are not pieces become their bytes, or one unknown id per run.
void BpeModel::replace_unknown_pieces(size_t begin, ModelScratch& scratch,
                                      std::vector<int32_t>& out) const {
  const auto is_unknown = [&](int32_t id) { return id < 0 || id >= data_.num_pieces; };
  if (std::none_of(out.begin() + static_cast<ptrdiff_t>(begin), out.end(), is_unknown)) return;
  scratch.ids.assign(out.begin() + static_cast<ptrdiff_t>(begin), out.end());
  out.resize(begin);
  bool unknown_before = false;
  for (const int32_t id : scratch.ids) {
    if (!is_unknown(id)) {
      out.push_back(id);
    } else if (data_.byte_fallback) {
      scratch.text.clear();
      if (id < 0) append_utf8(unknown_character(id), scratch.text);
      for (const char c : id < 0 ? scratch.text : data_.tokens[id])
        out.push_back(data_.byte_ids[static_cast<unsigned char>(c)]);
    } else if (!unknown_before) {
      out.push_back(data_.unknown);
    }
    unknown_before = is_unknown(id);
  }
}

void BpeModel::merge_short(const int32_t* initial, size_t count, std::vector<int32_t>& out) const {
  int32_t ids[kMaxShortSymbols], results[kMaxShortSymbols];
  uint32_t ranks[kMaxShortSymbols];  // of the pair (i, i + 1)
  std::copy(initial, initial + count, ids);
  for (size_t i = 0; i + 1 < count; ++i) ranks[i] = find_merge(ids[i], ids[i + 1], results[i]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) best = ranks[i] < ranks[best] ? i : best;
    if (ranks[best] == kNoRank) break;
    ids[best] = results[best];
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      if (i + 1 < count) {
        ranks[i] = ranks[i + 1];
        results[i] = results[i + 1];
      }
    }
    if (best + 1 < count) ranks[best] = find_merge(ids[best], ids[best + 1], results[best]);
    if (best > 0) ranks[best - 1] = find_merge(ids[best - 1], ids[best], results[best - 1]);
  }
  out.insert(out.end(), ids, ids + count);
}

// Symbols are a linked list; the heap holds (rank, position), stale if the rank at the position has
// changed since.
void BpeModel::merge_long(ModelScratch& s, std::vector<int32_t>& out) const {
  const size_t count = s.ids.size();
  MEGATRON_CHECK(count < (size_t{1} << 31), "a word of ", count, " bytes is too long to encode");
  const auto end = static_cast<int32_t>(count);
  s.next.resize(count);
  s.previous.resize(count);
  s.rank.resize(count);
  s.result.resize(count);
  s.heap.clear();
  const auto rate = [&](int32_t i) {
    s.rank[i] = s.next[i] < end ? find_merge(s.ids[i], s.ids[s.next[i]], s.result[i]) : kNoRank;
    return s.rank[i] != kNoRank;
  };
  const auto entry = [&](int32_t i) {
    return static_cast<uint64_t>(s.rank[i]) << 32 | static_cast<uint32_t>(i);
  };
  for (int32_t i = 0; i < end; ++i) {
    s.next[i] = i + 1;
    s.previous[i] = i - 1;
  }
  for (int32_t i = 0; i < end; ++i) {
    if (rate(i)) s.heap.push_back(entry(i));
  }
  std::make_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  const auto push = [&](int32_t i) {
    if (!rate(i)) return;
    s.heap.push_back(entry(i));
    std::push_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  };
  while (!s.heap.empty()) {
    const uint64_t top = s.heap.front();
    std::pop_heap(s.heap.begin(), s.heap.end(), std::greater<>());
    s.heap.pop_back();
    const auto at = static_cast<int32_t>(top & 0xffffffffu);
    if (s.rank[at] != static_cast<uint32_t>(top >> 32)) continue;
    const int32_t gone = s.next[at];
    s.ids[at] = s.result[at];
    s.rank[gone] = kNoRank;
    s.next[at] = s.next[gone];
    if (s.next[at] < end) s.previous[s.next[at]] = at;
    push(at);
    if (s.previous[at] >= 0) push(s.previous[at]);
  }
  for (int32_t i = 0; i < end; i = s.next[i]) out.push_back(s.ids[i]);
}

std::vector<BpeData::Merge> merges_of_vocabulary(std::vector<std::string>& tokens,
                                                 const std::vector<uint32_t>& rank_of,
                                                 bool characters) {
  const size_t num_tokens = tokens.size();
  std::unordered_map<std::string, int32_t> ids;
  ids.reserve(num_tokens);
  for (size_t id = 0; id < num_tokens; ++id) {
    if (!tokens[id].empty()) ids.emplace(tokens[id], static_cast<int32_t>(id));
  }
  const auto find = [&](const std::string& part) {
    const auto found = ids.find(part);
    if (found != ids.end()) return found->second;
    size_t length = 0;
    if (characters) decode_utf8(part.data(), length);
    if (length != part.size()) return -1;
    const auto id = static_cast<int32_t>(tokens.size());
    tokens.push_back(part);
    ids.emplace(part, id);
    return id;
  };
  std::vector<BpeData::Merge> merges;
  for (size_t id = 0; id < num_tokens; ++id) {
    if (rank_of[id] == kNeverMerged) continue;
    const std::string token = tokens[id];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      if (characters && (static_cast<unsigned char>(token[cut]) & 0xc0) == 0x80) continue;
      const int32_t left = find(token.substr(0, cut));
      if (left < 0) continue;
      const int32_t right = find(token.substr(cut));
      if (right >= 0) merges.push_back({left, right, static_cast<int32_t>(id), rank_of[id]});
    }
  }
  return merges;
}

}  // namespace megatron
