#include "megatron/inference/evaluation/neighbor_scoring.h"

#include "megatron/models/retro/retro_config.h"
#include "megatron/tensor/torch.h"

namespace megatron {

ScoringOptions scoring_with_neighbors(const ModelConfig& config, const Tokenizer& tokenizer,
                                      FindNeighbors find) {
  const auto& own = config.own.as_or_default<RetroConfig>();
  const int64_t m = own.retro_chunk_length, k = own.retro_num_neighbors,
                fill = tokenizer.eod().value_or(0);
  ScoringOptions options;
  options.row_multiple = m;
  options.add_columns = [m, k, fill, find = std::move(find)](
                            std::span<const std::span<const int32_t>> rows, int64_t, Batch& batch) {
    const int64_t b = std::ssize(rows), l = batch["tokens"].size(1) / m;
    std::vector<WholeChunk> asked;
    for (int64_t row = 0; row < b; ++row)
      for (WholeChunk& chunk : chunks_of_text(rows[static_cast<size_t>(row)], row, m, m))
        asked.push_back(std::move(chunk));
    std::vector<NeighborIds> found;
    if (!asked.empty()) found = find(asked);
    std::vector<NeighborIds> of_rows(static_cast<size_t>(b * l));  // none behind a row's end
    for (size_t i = 0; i < asked.size(); ++i)
      of_rows[static_cast<size_t>(asked[i].text * l + asked[i].chunk)] = std::move(found[i]);
    const NeighborColumns columns = neighbor_columns(of_rows, k, m, fill);
    const at::Device device = batch["tokens"].device();
    batch.set("neighbor_tokens", columns.tokens.view({b, l, k, 2 * m}).to(device));
    batch.set("neighbor_mask", columns.there.view({b, l, k}).to(device));
  };
  return options;
}

}  // namespace megatron
