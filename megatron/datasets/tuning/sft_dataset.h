// Conversations as samples: several are packed into each sequence, without attention between them.
//
// A conversation of n tokens takes n - 1 positions: token i as input, token i + 1 as its label,
// which is trained on if the assistant wrote it. Each is a document (Sample::document_starts) whose
// positions begin at 0. The rest of a sequence is filled with token 0, which is never trained on,
// and belongs to the last document.
//
// The order is a function of the files and the seed: in each epoch the conversations are permuted
// (training) or keep their order, and each goes into the first open sequence with room; the oldest
// sequence is closed when too many are open. Requesting more samples extends the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"
#include "megatron/datasets/sources/conversation.h"

namespace megatron {

// The token ids of all conversations of a file or folder, cached next to it (or in `cache_path`)
// and mapped.
class SftTokens {
 public:
  // Throws Error that names file and line.
  SftTokens(const std::string& path, const ConversationEncoder& encoder,
            const std::string& cache_path);
  ~SftTokens();
  int64_t size() const;  // conversations
  // Ids; those not trained on as ~id.
  std::span<const int32_t> operator[](int64_t conversation) const;
  const std::string& path() const;
  const std::string& description() const;  // see Dataset

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SftDatasetOptions {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  SftLongConversations long_conversations = SftLongConversations::kCut;
};

// Statistics of the conversations of one epoch.
struct SftCounts {
  int64_t conversations = 0;
  int64_t cut = 0;      // truncated to a sequence
  int64_t dropped = 0;  // dropped because longer than a sequence
  int64_t silent = 0;   // dropped because nothing is trained on
  int64_t samples = 0;
  int64_t tokens = 0;   // positions that conversations take
  int64_t counted = 0;  // labels that are trained on
};

class SftDataset final : public Dataset {
 public:
  // Conversations within `bounds`, fractions of all. `num_samples` nullopt: one epoch; otherwise at
  // least as many, over as many epochs as needed. Throws Error if no conversation is left.
  SftDataset(std::shared_ptr<const SftTokens> tokens, std::pair<double, double> bounds, Split split,
             std::optional<int64_t> num_samples, const SftDatasetOptions& options);
  ~SftDataset() override;
  int64_t size() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;
  const SftCounts& counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Synthetic conversations for --mock-data: the documents of MockGPTDataset, of which the second
// half is trained on.
std::shared_ptr<const Dataset> make_mock_sft_dataset(Split split, int64_t num_samples,
                                                     const GPTDatasetConfig& config);

}  // namespace megatron
