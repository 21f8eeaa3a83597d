// Conversations as samples: several of them packed into each sequence, apart from each other.
//
// A conversation of n tokens takes n - 1 places: token i at a place, token i + 1 as its label,
// which counts if the assistant wrote it. Each is a piece of its own (Sample::document_starts), its
// positions begin at 0. What is left of a sequence is filled with token 0, which counts nowhere, at
// the end of the last piece.
//
// The order is a function of the files and the seed: in each epoch the conversations are permuted
// (training) or stay as they are, and each goes into the first of the open sequences that has room;
// a sequence is given out when too many are open. More samples are more of the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "megatron/datasets/conversation.h"
#include "megatron/datasets/dataset.h"
#include "megatron/datasets/gpt_dataset.h"

namespace megatron {

// The token ids of all conversations of a file or folder. They are kept in a cache beside it (or in
// `cache_path`) and mapped.
class SftTokens {
 public:
  // Throws Error that names file and line.
  SftTokens(const std::string& path, const ConversationEncoder& encoder,
            const std::string& cache_path);
  ~SftTokens();
  int64_t size() const;  // conversations
  // Ids; those that do not count as ~id.
  std::span<const int32_t> operator[](int64_t conversation) const;
  const std::string& path() const;
  const std::string& description() const;  // as Dataset's

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SftDatasetOptions {
  int64_t sequence_length = 0;
  int64_t seed = 1234;
  SftLongConversations long_conversations = SftLongConversations::kCut;
};

// What became of the conversations of one epoch.
struct SftCounts {
  int64_t conversations = 0;
  int64_t cut = 0;      // longer than a sequence
  int64_t dropped = 0;  // longer, and dropped for that
  int64_t silent = 0;   // nothing that counts, and dropped for that
  int64_t samples = 0;
  int64_t tokens = 0;   // places that conversations take
  int64_t counted = 0;  // labels that count
};

class SftDataset final : public Dataset {
 public:
  // Conversations that lie within `bounds`, fractions of all. `num_samples` none: one epoch;
  // otherwise at least as many, over as many epochs as they take. Throws Error when no conversation
  // is left.
  SftDataset(std::shared_ptr<const SftTokens> tokens, std::pair<double, double> bounds, Split split,
             std::optional<int64_t> num_samples, const SftDatasetOptions& options);
  ~SftDataset() override;
  int64_t size() const override;
  int64_t sequence_length() const override;
  void read(int64_t index, const SampleSpans& out,
            std::vector<int32_t>& document_starts) const override;
  std::string description() const override;
  const SftCounts& counts() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Made-up conversations for --mock-data: the documents of MockGPTDataset, of which the second half
// counts.
std::shared_ptr<const Dataset> make_mock_sft_dataset(Split split, int64_t num_samples,
                                                     const GPTDatasetConfig& config);

}  // namespace megatron
