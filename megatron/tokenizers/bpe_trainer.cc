#include "megatron/tokenizers/bpe_trainer.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <queue>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/pre_tokenizer.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/unicode_normalization.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

constexpr size_t kNumShards = 64;

// Allows lookups of string keys by views, so that a known word costs no allocation.
struct BytesHash {
  using is_transparent = void;
  size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>()(bytes); }
};
using WordMap = std::unordered_map<std::string, int64_t, BytesHash, std::equal_to<>>;

KnownPattern parse_pattern(std::string_view name) {
  if (name == "gpt2") return KnownPattern::kGpt2;
  if (name == "llama3") return KnownPattern::kLlama3;
  if (name == "qwen2") return KnownPattern::kQwen2;
  throw UsageError(cat("--pattern is \"", name, "\", expected gpt2, llama3 or qwen2"));
}

void add_count(WordMap& words, std::string_view word, int64_t count) {
  const auto found = words.find(word);
  if (found != words.end()) {
    found->second += count;
  } else {
    words.emplace(word, count);
  }
}

}  // namespace

struct WordCounter::Impl {
  explicit Impl(const BpeTrainerOptions& options)
      : pre_tokenizer({{.kind = PreTokenizerStep::Kind::kSplitRegex,
                        .pattern = std::string(pattern_text(parse_pattern(options.pattern)))}},
                      "--pattern"),
        nfc(options.pattern == "qwen2"),
        max_words(options.max_words) {}

  struct Shard {
    std::mutex mutex;
    WordMap words;
  };
  PreTokenizer pre_tokenizer;
  bool nfc;
  int64_t max_words;
  int64_t threshold = 0;
  int64_t forgotten = 0;
  std::array<Shard, kNumShards> shards;
};

WordCounter::WordCounter(const BpeTrainerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
WordCounter::~WordCounter() = default;

// Counts locally first, then adds to the shared maps, one shard at a time.
void WordCounter::count(const std::vector<std::string_view>& documents) {
  WordMap local;
  PreTokenizer::Scratch scratch;
  std::string repaired, normalized;
  for (std::string_view text : documents) {
    if (valid_utf8_prefix(text) != text.size()) {
      repaired.clear();
      append_repaired_utf8(text, repaired);
      text = repaired;
    }
    if (impl_->nfc) text = to_normal_form(NormalForm::kNfc, text, normalized);
    impl_->pre_tokenizer.split(text, true, scratch, [&](const char* begin, const char* end) {
      add_count(local, {begin, static_cast<size_t>(end - begin)}, 1);
    });
  }
  std::array<std::vector<const WordMap::value_type*>, kNumShards> by_shard;
  for (const auto& entry : local) by_shard[BytesHash()(entry.first) % kNumShards].push_back(&entry);
  for (size_t i = 0; i < kNumShards; ++i) {
    const std::lock_guard lock(impl_->shards[i].mutex);
    for (const auto* entry : by_shard[i])
      add_count(impl_->shards[i].words, entry->first, entry->second);
  }
}

int64_t WordCounter::num_words() const {
  size_t total = 0;
  for (const Impl::Shard& shard : impl_->shards) total += shard.words.size();
  return static_cast<int64_t>(total);
}

int64_t WordCounter::num_forgotten() const { return impl_->forgotten; }

void WordCounter::prune() {
  const int64_t before = num_words();
  if (before <= impl_->max_words) return;
  int64_t threshold = 0;
  while (num_words() > impl_->max_words) {
    ++threshold;
    for (Impl::Shard& shard : impl_->shards) {
      std::erase_if(shard.words, [&](const auto& entry) { return entry.second <= threshold; });
    }
  }
  impl_->forgotten += before - num_words();
}

std::vector<std::pair<std::string, int64_t>> WordCounter::take() {
  std::vector<std::pair<std::string, int64_t>> words;
  words.reserve(static_cast<size_t>(num_words()));
  for (Impl::Shard& shard : impl_->shards) {
    words.insert(words.end(), shard.words.begin(), shard.words.end());
    WordMap().swap(shard.words);
  }
  std::sort(words.begin(), words.end());
  return words;
}

namespace {

// The words as sequences of tokens, the counts of adjacent pairs, and a priority queue of the most
// frequent ones.
class BpeLearner {
 public:
  BpeLearner(const std::vector<std::pair<std::string, int64_t>>& words,
             const BpeTrainerOptions& options)
      : min_frequency_(std::max<int64_t>(options.min_frequency, 1)) {
    const auto size = options.vocab_size - static_cast<int64_t>(options.special_tokens.size());
    if (size < 256) {
      throw UsageError(cat("--vocab-size ", options.vocab_size,
                           " is too small\nhint: 256 bytes and ", options.special_tokens.size(),
                           " special tokens need at least ", 256 + options.special_tokens.size()));
    }
    vocab_size_ = static_cast<size_t>(size);
    make_alphabet();
    load_words(words);
    count_pairs();
  }

  LearnedBpe run() {
    while (bpe_.tokens.size() < vocab_size_ && !queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      Pair& pair = pairs_[top.index];
      if (pair.count != top.count) {  // the count has changed since it was queued
        if (pair.count > 0 && pair.count < top.count) push(top.index);
        continue;
      }
      if (top.count < min_frequency_) break;
      merge(top.index);
    }
    return std::move(bpe_);
  }

 private:
  struct Word {
    size_t begin;  // in symbols_
    uint32_t length;
    int64_t count;
  };
  struct Pair {
    int32_t left, right;
    int64_t count = 0;
    std::vector<uint32_t> words;  // words that may contain it
  };
  struct Candidate {
    int64_t count;
    int32_t left, right;
    uint32_t index;
    bool operator<(
        const Candidate& other) const {  // the top is the most frequent, then the smallest pair
      if (count != other.count) return count < other.count;
      if (left != other.left) return left > other.left;
      return right > other.right;
    }
  };

  // Ids of bytes in the order of their printable spelling, as GPT-2 numbers them.
  void make_alphabet() {
    std::array<int, 256> order;
    for (int byte = 0; byte < 256; ++byte) order[byte] = byte;
    std::sort(order.begin(), order.end(), [](int a, int b) {
      return byte_level_char(static_cast<unsigned char>(a)) <
             byte_level_char(static_cast<unsigned char>(b));
    });
    for (int id = 0; id < 256; ++id) {
      byte_ids_[order[id]] = id;
      add_token(std::string(1, static_cast<char>(order[id])));
    }
  }

  int32_t add_token(const std::string& bytes) {
    const auto [found, is_new] =
        token_ids_.emplace(bytes, static_cast<int32_t>(bpe_.tokens.size()));
    if (is_new) bpe_.tokens.push_back(bytes);
    return found->second;
  }

  void load_words(const std::vector<std::pair<std::string, int64_t>>& words) {
    size_t total = 0;
    for (const auto& word : words) total += word.first.size();
    symbols_.reserve(total);
    words_.reserve(words.size());
    for (const auto& [bytes, count] : words) {
      words_.push_back({symbols_.size(), static_cast<uint32_t>(bytes.size()), count});
      for (const char c : bytes) symbols_.push_back(byte_ids_[static_cast<unsigned char>(c)]);
    }
  }

  Pair& pair(int32_t left, int32_t right, uint32_t& index) {
    const uint64_t key = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
    const auto [found, is_new] = pair_index_.emplace(key, static_cast<uint32_t>(pairs_.size()));
    if (is_new) pairs_.push_back({left, right, 0, {}});
    index = found->second;
    return pairs_[index];
  }

  // Adds `count` occurrences, in `word`; kNoWord if they are removed.
  uint32_t change(int32_t left, int32_t right, int64_t count, uint32_t word) {
    uint32_t index;
    Pair& changed = pair(left, right, index);
    changed.count += count;
    if (word != kNoWord && (changed.words.empty() || changed.words.back() != word))
      changed.words.push_back(word);
    return index;
  }

  void push(uint32_t index) {
    queue_.push({pairs_[index].count, pairs_[index].left, pairs_[index].right, index});
  }

  void count_pairs() {
    for (uint32_t w = 0; w < words_.size(); ++w) {
      const int32_t* s = &symbols_[words_[w].begin];
      for (uint32_t i = 0; i + 1 < words_[w].length; ++i)
        change(s[i], s[i + 1], words_[w].count, w);
    }
    for (uint32_t i = 0; i < pairs_.size(); ++i) push(i);
  }

  void merge(uint32_t index) {
    const int32_t left = pairs_[index].left, right = pairs_[index].right;
    bpe_.merges.emplace_back(left, right);
    const int32_t merged = add_token(bpe_.tokens[left] + bpe_.tokens[right]);
    const std::vector<uint32_t> places = std::move(pairs_[index].words);
    pairs_[index].words.clear();
    risen_.clear();
    for (const uint32_t w : places) merge_in_word(words_[w], w, left, right, merged);
    std::sort(risen_.begin(), risen_.end());
    risen_.erase(std::unique(risen_.begin(), risen_.end()), risen_.end());
    for (const uint32_t i : risen_) {
      if (pairs_[i].count > 0) push(i);
    }
  }

  // Merges all occurrences in one word in place, from left to right.
  void merge_in_word(Word& word, uint32_t w, int32_t left, int32_t right, int32_t merged) {
    int32_t* s = &symbols_[word.begin];
    uint32_t out = 0;
    for (uint32_t i = 0; i < word.length;) {
      if (s[i] != left || i + 1 == word.length || s[i + 1] != right) {
        s[out++] = s[i++];
        continue;
      }
      change(left, right, -word.count, kNoWord);
      if (out > 0) {
        change(s[out - 1], left, -word.count, kNoWord);
        risen_.push_back(change(s[out - 1], merged, word.count, w));
      }
      if (i + 2 < word.length) {
        change(right, s[i + 2], -word.count, kNoWord);
        risen_.push_back(change(merged, s[i + 2], word.count, w));
      }
      s[out++] = merged;
      i += 2;
    }
    word.length = out;
  }

  static constexpr uint32_t kNoWord = ~0u;

  int64_t min_frequency_;
  size_t vocab_size_ = 0;
  LearnedBpe bpe_;
  std::unordered_map<std::string, int32_t> token_ids_;
  std::array<int32_t, 256> byte_ids_{};
  std::vector<int32_t> symbols_;
  std::vector<Word> words_;
  std::unordered_map<uint64_t, uint32_t> pair_index_;
  std::vector<Pair> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<uint32_t> risen_;  // pairs that the current merge made more frequent
};

void append_json_string(std::string_view text, std::string& out) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kHex[] = "0123456789abcdef";
      out += "\\u00";
      out += kHex[c >> 4 & 15];
      out += kHex[c & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

std::string pre_tokenizer_json(const BpeTrainerOptions& options) {
  if (options.pattern == "gpt2") {
    return R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})";
  }
  std::string out = R"({"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": )";
  append_json_string(pattern_text(parse_pattern(options.pattern)), out);
  out += R"(}, "behavior": "Isolated", "invert": false},
    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
  ]})";
  return out;
}

}  // namespace

LearnedBpe learn_bpe(const std::vector<std::pair<std::string, int64_t>>& words,
                     const BpeTrainerOptions& options) {
  return BpeLearner(words, options).run();
}

std::string to_tokenizer_json(const LearnedBpe& bpe, const BpeTrainerOptions& options) {
  std::vector<std::string> spellings(bpe.tokens.size());
  for (size_t id = 0; id < bpe.tokens.size(); ++id)
    append_byte_level(bpe.tokens[id], spellings[id]);
  std::string out =
      "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  "
      "\"added_tokens\": [";
  for (size_t i = 0; i < options.special_tokens.size(); ++i) {
    out += i == 0 ? "\n    {\"id\": " : ",\n    {\"id\": ";
    out += std::to_string(bpe.tokens.size() + i) + ", \"content\": ";
    append_json_string(options.special_tokens[i], out);
    out +=
        ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
        "\"special\": true}";
  }
  out += "\n  ],\n  \"normalizer\": ";
  out += options.pattern == "qwen2" ? "{\"type\": \"NFC\"}" : "null";
  out += ",\n  \"pre_tokenizer\": " + pre_tokenizer_json(options);
  out +=
      ",\n  \"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
      "\"trim_offsets\": false, \"use_regex\": true}";
  out +=
      ",\n  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": "
      "true, \"use_regex\": true}";
  out +=
      ",\n  \"model\": {\n    \"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
      "\"continuing_subword_prefix\": null,";
  out +=
      "\n    \"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
      "\"ignore_merges\": ";
  out += options.pattern == "llama3" ? "true" : "false";
  out += ",\n    \"vocab\": {";
  for (size_t id = 0; id < spellings.size(); ++id) {
    out += id == 0 ? "\n      " : ",\n      ";
    append_json_string(spellings[id], out);
    out += ": " + std::to_string(id);
  }
  out += "\n    },\n    \"merges\": [";
  for (size_t rank = 0; rank < bpe.merges.size(); ++rank) {
    out += rank == 0 ? "\n      " : ",\n      ";
    append_json_string(spellings[bpe.merges[rank].first] + " " + spellings[bpe.merges[rank].second],
                       out);
  }
  out += "\n    ]\n  }\n}\n";
  return out;
}

}  // namespace megatron
