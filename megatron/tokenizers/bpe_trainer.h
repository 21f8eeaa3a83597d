// Trains byte-level BPE on text and writes it as a tokenizer.json.
//
// The result depends only on the text and the options, not on the number of threads, and equals
// what the `tokenizers` package's BpeTrainer learns from the same words.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megatron {

struct BpeTrainerOptions {
  int64_t vocab_size = 32000;    // including the 256 bytes and the special tokens
  int64_t min_frequency = 2;     // pairs that are rarer are not merged
  std::string pattern = "gpt2";  // gpt2, llama3 or qwen2: the pattern that splits text into words
  std::vector<std::string> special_tokens = {"<|endoftext|>"};  // get the last ids
  int64_t max_words = 8'000'000;  // maximum of distinct words that are counted; see WordCounter
};

// Counts the words of documents. Memory: about 80 bytes per distinct word. prune() limits these to
// max_words by dropping the rarest words: first those seen once, then twice, and so on. The caller
// calls it after each round of text.
class WordCounter {
 public:
  explicit WordCounter(const BpeTrainerOptions& options);
  ~WordCounter();
  // Counts the words of each document. Thread safe.
  void count(const std::vector<std::string_view>& documents);
  // Keeps at most max_words distinct words. Not while count() runs.
  void prune();
  int64_t num_words() const;      // distinct
  int64_t num_forgotten() const;  // distinct words that prune() dropped
  // All words with their counts, sorted by their bytes.
  std::vector<std::pair<std::string, int64_t>> take();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct LearnedBpe {
  std::vector<std::string> tokens;                  // bytes by id, without special tokens
  std::vector<std::pair<int32_t, int32_t>> merges;  // by rank
};

// Repeatedly merges the most frequent pair of tokens, on a tie the one with the smallest ids, until
// the vocabulary is full.
LearnedBpe learn_bpe(const std::vector<std::pair<std::string, int64_t>>& words,
                     const BpeTrainerOptions& options);

// The tokenizer.json, as text.
std::string to_tokenizer_json(const LearnedBpe& bpe, const BpeTrainerOptions& options);

struct TrainingInput {
  // files (plain, .gz, .zst; .jsonl and .json hold JSON lines) and folders
  std::vector<std::filesystem::path> paths;
  std::vector<std::string> json_keys = {"text"};
  int threads = 0;  // 0: all cores
};

struct TrainingReport {
  int64_t num_files = 0, num_bytes = 0, num_documents = 0, num_words = 0, num_forgotten = 0;
  int64_t num_tokens = 0, num_merges = 0;  // num_tokens with special tokens
};

// Reads, counts, trains and writes `output` (atomically). Throws Error that names file and line of
// input that cannot be read.
TrainingReport train_bpe(const TrainingInput& input, const BpeTrainerOptions& options,
                         const std::filesystem::path& output);

}  // namespace megatron
