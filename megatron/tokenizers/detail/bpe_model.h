// Byte-pair encoding of single words, as a pre-tokenizer splits text.
//
// Merges are applied by rank, on a tie the leftmost first. Short words are merged in registers and
// on the stack, long ones with a heap in O(n log n).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "megatron/tokenizers/detail/metaspace_cutter.h"
#include "megatron/tokenizers/detail/word_cache.h"

namespace megatron {

// The definition of a BPE model.
struct BpeData {
  struct Merge {
    int32_t left, right, result;
    uint32_t rank;
  };
  // The initial symbols of a word before merging.
  enum class Symbols {
    kBytes,       // bytes; `tokens` are bytes, not the printable spelling of tokenizer.json
    kCharacters,  // characters, as in the `tokenizers` package
    kPieces,      // characters, as in SentencePiece: unknown ones are handled after merging
  };
  Symbols symbols = Symbols::kBytes;
  std::vector<std::string> tokens;      // by id; empty in gaps
  std::vector<bool> is_word;            // by id: the token can be looked up as a whole word
  std::array<int32_t, 256> byte_ids{};  // ids of single bytes, or of <0x00> to <0xFF>; -1: none
  std::vector<Merge> merges;
  bool ignore_merges = false;  // a word that is a token is not split
  int32_t unknown = -1;        // id of unknown symbols; -1: none
  bool fuse_unknown = false;   // one id for a run of unknown symbols
  // -- characters only
  bool byte_fallback = false;  // unknown characters become their bytes, if byte_ids has them all
  std::string prefix, suffix;  // of symbols that do not begin a word, or that end one
  // -- pieces only: tokens from this id on are characters that occur only in merges
  int32_t num_pieces = 0;
};

// Thread safe except for the scratch memory.
class BpeModel : public WordModel {
 public:
  explicit BpeModel(BpeData data);

  const BpeData& data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(data_.tokens.size()); }
  // Where words that contain U+2581 may be split without changing their ids.
  const MetaspaceCutter& cutter() const { return cutter_; }

  void encode_word(std::string_view word, ModelScratch& scratch,
                   std::vector<int32_t>& out) const override;

 private:
  struct Slot {
    uint64_t pair;
    uint32_t rank;
    int32_t result;
  };
  static constexpr uint32_t kNoRank = ~0u;

  // The rank of merging two tokens, kNoRank if they do not merge.
  uint32_t find_merge(int32_t left, int32_t right, int32_t& result) const {
    const uint64_t pair =
        static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    for (uint64_t at = (pair * 0x9e3779b97f4a7c15u) >> shift_;; at = (at + 1) & mask_) {
      const Slot& slot = slots_[at];
      if (slot.pair == pair) {
        result = slot.result;
        return slot.rank;
      }
      if (slot.pair == kEmptyPair) return kNoRank;
    }
  }
  static constexpr uint64_t kEmptyPair = ~uint64_t{0};  // unused, since no id is -1

  void insert_merge(const BpeData::Merge& merge);
  void index_characters();
  MetaspaceCutter make_cutter() const;
  void initial_bytes(std::string_view word, std::vector<int32_t>& ids) const;
  void initial_characters(std::string_view word, ModelScratch& scratch) const;
  void initial_pieces(std::string_view word, std::vector<int32_t>& ids) const;
  int32_t symbol(std::string_view character, bool first, bool last, std::string_view& spelled,
                 std::string& buffer) const;
  void merge_short(const int32_t* initial, size_t count, std::vector<int32_t>& out) const;
  void merge_long(ModelScratch& scratch, std::vector<int32_t>& out) const;
  void replace_unknown_pieces(size_t begin, ModelScratch& scratch, std::vector<int32_t>& out) const;

  BpeData data_;
  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
  int shift_ = 0;
  std::unordered_map<std::string_view, int32_t> words_;  // for ignore_merges and affixed symbols
  std::vector<int32_t> character_ids_;                   // by code point; -1: none
  MetaspaceCutter cutter_;
};

// Merges that join any two tokens whose concatenation is a token, ranked by the result, as tiktoken
// and SentencePiece store BPE. `rank_of[id]` is kNeverMerged for results that no merge produces.
// With `characters`, halves that are single characters but not tokens are added to `tokens`.
inline constexpr uint32_t kNeverMerged = ~0u;
std::vector<BpeData::Merge> merges_of_vocabulary(std::vector<std::string>& tokens,
                                                 const std::vector<uint32_t>& rank_of,
                                                 bool characters);

}  // namespace megatron
