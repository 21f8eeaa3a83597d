// Trains a tokenizer.json from text files: reading, counting in rounds, training, writing.
#include <algorithm>
#include <atomic>
#include <future>
#include <set>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/progress.h"
#include "megatron/base/threads.h"
#include "megatron/tokenizers/bpe_trainer.h"
#include "megatron/tokenizers/detail/text/text_blocks.h"

namespace megatron {
namespace {

// Words are pruned between rounds, so the round's size is part of the result: it must not depend on
// the machine.
constexpr size_t kBlocksPerRound = 64;

std::vector<TextBlock> read_round(TextBlockReader& reader) {
  std::vector<TextBlock> blocks;
  TextBlock block;
  while (blocks.size() < kBlocksPerRound && reader.next(block)) blocks.push_back(std::move(block));
  return blocks;
}

// Counts the words of all input; the next round is prefetched while one is counted.
void count_words(TextBlockReader& reader, const TrainingInput& input, WordCounter& counter,
                 TrainingReport& report) {
  ProgressBar progress("counting words", 0, "B");
  std::vector<TextBlock> blocks = read_round(reader);
  while (!blocks.empty()) {
    std::future<std::vector<TextBlock>> next =
        std::async(std::launch::async, [&reader] { return read_round(reader); });
    std::atomic<int64_t> documents{0};
    parallel_for(
        static_cast<int64_t>(blocks.size()), 1,
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const std::vector<std::string> texts = block_documents(blocks[i], input.json_keys);
            counter.count({texts.begin(), texts.end()});
            documents += static_cast<int64_t>(texts.size());
            progress.advance(blocks[i].bytes.size());
          }
        },
        input.threads);
    counter.prune();
    report.num_documents += documents;
    for (const TextBlock& block : blocks)
      report.num_bytes += static_cast<int64_t>(block.bytes.size());
    blocks = next.get();
  }
}

void check_special_tokens(const BpeTrainerOptions& options, const LearnedBpe& bpe) {
  std::set<std::string> seen(bpe.tokens.begin(), bpe.tokens.end());
  for (const std::string& token : options.special_tokens) {
    MEGATRON_CHECK(!token.empty(), "a special token is empty");
    MEGATRON_CHECK(seen.insert(token).second, "the special token \"", token,
                   "\" is given twice or is an ordinary token of the text");
  }
}

}  // namespace

TrainingReport train_bpe(const TrainingInput& input, const BpeTrainerOptions& options,
                         const std::filesystem::path& output) {
  check_special_tokens(options, {});
  TextBlockReader reader(input.paths);
  WordCounter counter(options);
  TrainingReport report;
  report.num_files = reader.num_files();
  count_words(reader, input, counter, report);
  report.num_forgotten = counter.num_forgotten();
  const auto words = counter.take();
  MEGATRON_CHECK(!words.empty(), "the input holds no text to learn from");
  report.num_words = static_cast<int64_t>(words.size());
  const LearnedBpe bpe = learn_bpe(words, options);
  check_special_tokens(options, bpe);
  report.num_merges = static_cast<int64_t>(bpe.merges.size());
  report.num_tokens = static_cast<int64_t>(bpe.tokens.size() + options.special_tokens.size());
  write_file_atomically(output, to_tokenizer_json(bpe, options));
  return report;
}

}  // namespace megatron
