// Sequences that are decoded together, for tests of layers.
#pragma once

#include <vector>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// Tokens [first, first + count) of a sequence.
struct StepPart {
  int64_t sequence = 0, first = 0, count = 0;
};

// `num_sequences` sequences of up to `length` positions whose blocks lie mingled in the pool, the
// last ones first.
class RaggedSteps {
 public:
  RaggedSteps(int64_t num_sequences, int64_t length, int64_t block_size)
      : sequences_(num_sequences),
        per_sequence_((length + block_size - 1) / block_size),
        block_size_(block_size) {}

  int64_t pool_positions() const { return sequences_ * per_sequence_ * block_size_; }

  RaggedBatch batch(const std::vector<StepPart>& parts) const {
    std::vector<RaggedPart> ragged;
    std::vector<int64_t> slots;
    for (const StepPart& part : parts) {
      std::vector<int32_t> blocks;
      for (int64_t i = 0; i < per_sequence_; ++i)
        blocks.push_back(
            static_cast<int32_t>((per_sequence_ - i) * sequences_ - part.sequence - 1));
      ragged.push_back({part.first, part.count, std::move(blocks)});
      slots.push_back(part.sequence);
    }
    return {PagedRows(std::move(ragged), sequences_ * per_sequence_, block_size_, at::kCPU),
            std::move(slots), sequences_};
  }

  // The inputs of one forward over a batch.
  static ForwardContext context_of(const DecodingPass& pass) {
    ForwardContext context;
    context.decoding = &pass;
    context.place = {at::zeros({1}, at::kLong), pass.batch.rows.positions};
    context.position_ids = context.place.position.unsqueeze(0);
    return context;
  }

  // Runs the parts' rows of x [s, sequences, h] through the block: [count, h] for each part.
  std::vector<at::Tensor> forward(TransformerBlock& block, const at::Tensor& x,
                                  const std::vector<StepPart>& parts) {
    std::vector<at::Tensor> rows;
    std::vector<int64_t> counts;
    for (const StepPart& part : parts) {
      rows.push_back(x.select(1, part.sequence).narrow(0, part.first, part.count));
      counts.push_back(part.count);
    }
    const RaggedBatch ragged = batch(parts);
    const DecodingPass pass{state, ragged};
    return block.forward(at::cat(rows).unsqueeze(1), context_of(pass))
        .squeeze(1)
        .split_with_sizes(counts);
  }

  DecodingState state;

 private:
  int64_t sequences_, per_sequence_, block_size_;
};

}  // namespace megatron
