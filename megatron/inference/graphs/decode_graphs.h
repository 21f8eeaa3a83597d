// Steps of few rows as CUDA graphs: one for each of some numbers of rows, and another one for those
// that are mostly several of a text. A step runs the next larger one; rows that are too many read
// and write nothing. Each row has its own table of blocks and its own length, so that rows may be
// tokens that sequences decode, drafts or parts of prompts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "megatron/tensor/device_graph.h"
#include "megatron/transformer/layer/layer_state.h"

namespace megatron {

// Numbers of rows with a graph, rising, for steps of up to `most` rows: `count` of them at equal
// distances; -1: 1, 2, 4, 8, then 8 apart up to 64, 16 to 128, 32 to 256, and 64; 0: none.
std::vector<int64_t> graph_sizes(int64_t count, int64_t most);

class DecodeGraphs {
 public:
  struct Pool {
    int64_t blocks = 0, block_size = 0;
    int64_t most_blocks = 0;  // of a sequence
    int64_t slots = 0;
  };
  // Ids [1, t] and where their rows lie -> a result [t, ...]. Runs on the current stream, without
  // waiting for the device or copying from the host.
  using Forward = std::function<at::Tensor(const at::Tensor& tokens, const RaggedBatch& batch)>;

  // `last_sampled` [slots] int64: what was drawn last for each slot; its memory stays.
  DecodeGraphs(std::vector<int64_t> sizes, const Pool& pool, at::Tensor last_sampled,
               Forward forward);

  struct Row {
    int32_t token = 0;  // an id; negative: what was drawn last for the slot
    int32_t slot = 0;
    int64_t position = 0;
    int64_t known = 0;                // positions of the sequence that are known
    std::span<const int32_t> blocks;  // of its positions; leading ones may be negative
  };
  int64_t most() const { return sizes_.back(); }  // rows of a step
  bool fits(std::span<const Row> rows) const;
  struct Result {
    at::Tensor rows;   // those of `forward` for the rows of the step, until the next call
    int64_t size = 0;  // t of the graph
  };
  // The first step of a size runs twice and is captured; throws Error, c10::Error if it cannot be.
  Result run(std::span<const Row> rows);
  // Captures the largest that is not, so that no step has to: smaller ones use its memory again.
  void capture_next();
  bool all_captured() const { return captured_.size() == kinds_.size(); }
  // Before weights or buffers of the cache move.
  void clear();

 private:
  struct Kind {
    int64_t size = 0;
    bool has_runs = false;  // PagedRows::has_runs()
    auto operator<=>(const Kind&) const = default;
  };
  struct Captured {
    RaggedBatch batch;
    at::Tensor result;
    DeviceGraph graph;
  };
  Kind kind_of(std::span<const Row> rows) const;
  RaggedBatch batch_of(const Kind& kind) const;
  at::Tensor tokens_of(int64_t size) const;
  int64_t table_numbers(int64_t size) const { return size * (1 + pool_.most_blocks); }
  Captured capture(const Kind& kind);
  void write(std::span<const Row> rows, int64_t size);

  const std::vector<int64_t> sizes_;
  const std::vector<Kind> kinds_;  // rising
  const Pool pool_;
  const at::Tensor last_sampled_;
  const Forward forward_;
  // Numbers of rows on the device, which one copy brings: as int64 ids, slots to take ids of (or
  // -1), places in the pool, positions and last known ones; behind them as int32 lengths, then
  // tables of blocks. Those of a graph follow each other without gaps.
  at::Tensor numbers_;
  std::unique_ptr<DeviceGraphPool> memory_;
  std::map<Kind, Captured> captured_;
};

}  // namespace megatron
