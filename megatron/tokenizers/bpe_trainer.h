// Learns byte-level BPE from text and writes it as a tokenizer.json.
//
// The result depends on the text and the options alone, not on the number of threads, and equals
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
  int64_t vocab_size = 32000;    // with the 256 bytes and the special tokens
  int64_t min_frequency = 2;     // pairs that are rarer are not merged
  std::string pattern = "gpt2";  // gpt2, llama3 or qwen2: how text is cut into words
  std::vector<std::string> special_tokens = {"<|endoftext|>"};  // get the last ids
  int64_t max_words = 8'000'000;  // distinct words that are counted; see WordCounter
};

// Counts the words of documents. Memory: about 80 bytes per distinct word, of which there are at
// most max_words when a round of text (the caller's choice; the text between two calls of prune())
// has been counted. Then the rarest words are forgotten: first those seen once, then twice, and so
// on.
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
  std::vector<std::string> tokens;  // bytes by id; special tokens are not among them
  std::vector<std::pair<int32_t, int32_t>> merges;  // by rank
};

// Merges the most frequent pair of tokens, among equals the one with the smallest ids, until the
// vocabulary is full.
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

// Reads, counts, learns and writes `output` (atomically). Throws Error naming file and line for
// input that cannot be read.
TrainingReport train_bpe(const TrainingInput& input, const BpeTrainerOptions& options,
                         const std::filesystem::path& output);

}  // namespace megatron
