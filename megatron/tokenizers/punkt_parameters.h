// What Punkt has learned of a language: abbreviations, words that start sentences, pairs of words,
// and in which case words occur where.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

class PunktParameters {
 public:
  // What is known of a type of words: lower case, numbers as ##number##, without a final period.
  // The bits from kBeginUpper to kUnknownLower are those of NLTK's files.
  enum Fact : uint16_t {
    kBeginUpper = 2,    // at the beginning of a sentence, in upper case
    kMiddleUpper = 4,   // within
    kUnknownUpper = 8,  // where it is not known
    kBeginLower = 16,
    kMiddleLower = 32,
    kUnknownLower = 64,
    kAbbreviation = 128,
    kStarter = 256,  // often starts sentences
    kPairs = 512,    // is the first of a collocation
    kUpper = kBeginUpper | kMiddleUpper | kUnknownUpper,
    kLower = kBeginLower | kMiddleLower | kUnknownLower,
  };

  PunktParameters() = default;  // nothing is known, as PunktSentenceTokenizer() has it

  // Facts of a type of words; 0 of one that is not known.
  uint16_t facts(std::string_view type) const { return facts(type, hash(type)); }
  // The same with hash(type), which may be computed while the type is put together.
  uint16_t facts(std::string_view type, uint64_t hash) const;
  // Whether the second type after the first, which ends in a period, is a collocation.
  bool is_collocation(std::string_view first, std::string_view second) const;

  static constexpr uint64_t kHashStart = 0xcbf29ce484222325ULL;
  static uint64_t hash_step(uint64_t hash, char c) {
    return (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ULL;
  }
  static uint64_t hash(std::string_view type);

  // Adds facts to a type.
  void add(std::string_view type, uint16_t facts);
  void add_collocation(std::string_view first, std::string_view second);

 private:
  struct Entry {
    uint64_t hash = 0;
    uint32_t begin = 0, size = 0;  // in text_
    uint16_t facts = 0;            // of a free entry 0
    bool used = false;
  };
  std::string_view type_at(const Entry& entry) const {
    return std::string_view(text_).substr(entry.begin, entry.size);
  }
  size_t place_of(std::string_view type, uint64_t hash) const;
  void grow();

  std::vector<Entry> entries_;  // open addressing; a power of two
  size_t used_ = 0;
  size_t longest_ = 0;  // bytes of a type
  std::string text_;
};

// Reads abbrev_types.txt, sent_starters.txt, collocations.tab and ortho_context.tab, the files of
// NLTK's punkt_tab. Throws Error that names file and line if one is missing or damaged.
PunktParameters read_punkt_parameters(const std::filesystem::path& folder);

// The folder of a language ("english") among NLTK's: tokenizers/punkt_tab/LANGUAGE below the
// folders of NLTK_DATA and NLTK's usual ones. Throws Error that names them if there is none.
std::filesystem::path find_punkt_parameters(const std::string& language);

}  // namespace megatron
