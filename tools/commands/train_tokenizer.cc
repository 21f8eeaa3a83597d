// megatron train-tokenizer: trains byte-level BPE on text.
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/threads.h"
#include "megatron/tokenizers/bpe_trainer.h"
#include "megatron/tokenizers/tokenizer_config.h"

namespace megatron {
namespace {

constexpr std::string_view kTrainTokenizerUsage =
    "megatron train-tokenizer --input FILE_OR_FOLDER... --output tokenizer.json --vocab-size N "
    "[options]";

struct TrainTokenizerConfig : Config {
  std::vector<std::string> input;
  std::string output = "tokenizer.json";
  std::vector<std::string> json_keys = {"text"};
  int64_t vocab_size = 32000;
  int64_t min_frequency = 2;
  std::string pattern = "gpt2";
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  int64_t max_words = 8'000'000;
  int64_t workers = 0;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("train-tokenizer");
    v.field("input", input,
            "text files and folders; .gz and .zst are unpacked; *.jsonl, *.ndjson, and *.json "
            "given as a file, hold JSON "
            "lines");
    v.field("output", output, "the tokenizer.json to write");
    v.field("json_keys", json_keys, "members of a JSON line to learn from");
    v.field("vocab_size", vocab_size,
            "number of tokens, with the 256 bytes and the special tokens");
    v.field("min_frequency", min_frequency, "pairs of tokens that are rarer are not merged");
    v.field("pattern", pattern, "how text is cut into words: gpt2, llama3 or qwen2");
    v.field("special_tokens", special_tokens,
            "tokens that text never merges into; they get the last ids");
    v.field("max_words", max_words,
            "distinct words to count; beyond it the rarest are forgotten. About 80 bytes of memory "
            "each");
    v.field({"workers", "--workers --num-threads"}, workers,
            "threads; 0: OMP_NUM_THREADS, else all cores. The result is the same for any number");
    v.field("json", json, "print the report as JSON");
  }

  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("--input is not given", "text files and folders");
    if (output.empty()) violations.add("--output is empty", "a path such as tokenizer.json");
    if (pattern != "gpt2" && pattern != "llama3" && pattern != "qwen2") {
      violations.add(cat("--pattern is \"", pattern, "\""), "gpt2, llama3, qwen2");
    }
    const auto least = static_cast<int64_t>(256 + special_tokens.size());
    if (vocab_size < least || vocab_size > (int64_t{1} << 24)) {
      violations.add(cat("--vocab-size is ", vocab_size),
                     cat(least, " (256 bytes and the special tokens) to 16777216"));
    }
    if (min_frequency < 1) violations.add(cat("--min-frequency is ", min_frequency), "1 or more");
    if (max_words < 1000) violations.add(cat("--max-words is ", max_words), "1000 or more");
    if (workers < 0 || workers > 4096) violations.add(cat("--workers is ", workers), "0 to 4096");
    if (json_keys.empty()) violations.add("--json-keys is empty", "member names such as text");
  }
};

// transformers reads tokenizer_config.json next to a tokenizer.json; only files of that name get
// one.
void describe_output(const std::filesystem::path& output) {
  if (output.filename() != "tokenizer.json") return;
  const std::filesystem::path folder = output.has_parent_path() ? output.parent_path() : ".";
  const std::filesystem::path path = folder / "tokenizer_config.json";
  if (std::filesystem::exists(path)) {
    log_warning(
        cat(path.string(), ": is left as it is, and may name tokens of an earlier tokenizer"));
    return;
  }
  write_file_atomically(path, tokenizer_config_json(folder, std::nullopt));
}

void print_report(const TrainTokenizerConfig& config, const TrainingReport& report,
                  double seconds) {
  if (config.json) {
    std::printf(
        "{\"files\": %lld, \"bytes\": %lld, \"documents\": %lld, \"words\": %lld, "
        "\"forgotten_words\": %lld, "
        "\"merges\": %lld, \"vocab_size\": %lld, \"seconds\": %.3f}\n",
        static_cast<long long>(report.num_files), static_cast<long long>(report.num_bytes),
        static_cast<long long>(report.num_documents), static_cast<long long>(report.num_words),
        static_cast<long long>(report.num_forgotten), static_cast<long long>(report.num_merges),
        static_cast<long long>(report.num_tokens), seconds);
    return;
  }
  std::printf(
      "%s: %lld tokens (%lld merges) from %lld distinct words in %.1f MB of text of %lld files, "
      "%.1f s\n",
      config.output.c_str(), static_cast<long long>(report.num_tokens),
      static_cast<long long>(report.num_merges), static_cast<long long>(report.num_words),
      static_cast<double>(report.num_bytes) / 1e6, static_cast<long long>(report.num_files),
      seconds);
}

}  // namespace

int train_tokenizer(int argc, char** argv) {
  TrainTokenizerConfig config;
  const std::array<Config*, 1> configs = {&config};
  if (!parse_or_help(kTrainTokenizerUsage, configs, argc, argv, {.positional = "input"})) return 0;
  const auto start = std::chrono::steady_clock::now();
  BpeTrainerOptions options;
  options.vocab_size = config.vocab_size;
  options.min_frequency = config.min_frequency;
  options.pattern = config.pattern;
  options.special_tokens = config.special_tokens;
  options.max_words = config.max_words;
  TrainingInput input;
  input.paths.assign(config.input.begin(), config.input.end());
  input.json_keys = config.json_keys;
  input.threads = choose_num_threads(config.workers);
  const TrainingReport report = train_bpe(input, options, config.output);
  describe_output(config.output);
  if (report.num_tokens < config.vocab_size) {
    log_warning(cat("the text has only enough pairs that occur --min-frequency ",
                    config.min_frequency, " times for ", report.num_tokens,
                    " tokens; --vocab-size is ", config.vocab_size));
  }
  if (report.num_forgotten > 0) {
    log_warning(cat(report.num_forgotten, " rare words were forgotten to stay within --max-words ",
                    config.max_words));
  }
  print_report(config, report,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return 0;
}

}  // namespace megatron
