// Checks that ranks which hold replicas of a tensor hold the same bits: compares hashes of weights,
// master weights and moments over these ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/hash.h"

namespace megatron {

// Which ranks hold copies follows from placements and groups (nn/reduction.h) and sharding:
//   weights                       all data ranks; with sharded values the ranks of other instances
//                                 with the same shard
//   master weights and moments    all data ranks; with sharded states those of other instances
//   what tensor ranks hold whole  times the tensor ranks (norms, biases of row-parallel layers)
//   what stages share             times those stages (a tied embedding)
// What no other rank holds is not looked at. A difference names the ranks that are alone with their
// hash; without a majority all of them.
//
// A comparison: before_update(), Optimizer::step(), after_update(). Weights are hashed before the
// update, because the update rewrites them from master weights or gathered shards and so erases
// errors in the copies that the step computed with; states are hashed after it. Nothing waits for
// the device, unless the optimizer has states in host memory; nothing that is trained changes.
//
// Keeps references to stores, optimizer and groups, and views of their tensors. Not thread safe.
class ReplicaHashes {
 public:
  // `trained`: the stores that `optimizer` updates; further ones hold weights that never change.
  // `world`: all ranks.
  ReplicaHashes(const Optimizer& optimizer, const std::vector<DistributedDataParallel*>& trained,
                const std::vector<DistributedDataParallel*>& frozen, const ProcessGroup& world);

  // Number of this rank's tensors that have replicas.
  int64_t size() const { return static_cast<int64_t>(items_.size()); }

  void before_update();
  // Returns [1] int64 on the model's device: 1 if a replica of a tensor of this rank differs, else
  // 0; other ranks may see other tensors. Communication: up to four all-reduces of 16 bytes for
  // each tensor.
  at::Tensor after_update(int64_t iteration);

  // Describes what differed in the comparison of that iteration, one of the last two, and on which
  // ranks: the same text on every rank. Collective over all ranks; synchronises with the device.
  std::string describe(int64_t iteration) const;

 private:
  struct Item {
    std::string tensor;  // for messages: "decoder.final_layernorm.weight (exp_avg)"
    std::string key;     // equal on ranks that hold replicas, and only there
    at::Tensor data;
    bool before = false;                      // hashed before the update
    std::vector<const ProcessGroup*> copies;  // on the ranks of these groups
    const ProcessGroup* shared = nullptr;     // that of `copies` which joins stages
  };
  struct Comparison {
    int64_t iteration = 0;
    at::Tensor hashes;   // [size()] int64
    at::Tensor differs;  // [size()] bool
  };
  // Items [begin, end), which are on one device.
  struct Batch {
    int64_t begin, end;
    TensorHashes hashes;
  };

  void add_item(const Parameter& parameter, const char* kind, const at::Tensor& data,
                bool whole_value);
  const DataGrid& grid_of(const Parameter& parameter) const;
  void make_batches();
  void make_joins();
  void compute(const std::vector<Batch>& batches);
  void join(at::Tensor extremes, const ProcessGroup& group, const at::Tensor& chosen) const;
  // Indices of the items that the function chooses, on the device; undefined: none.
  template <class Chosen>
  at::Tensor places(const Chosen& chosen) const;

  const ParallelGroups& groups_;
  const DataParallelGroups& data_;
  const ProcessGroup& world_;
  const at::Device device_;
  std::vector<Item> items_;  // items hashed before the update come first
  std::vector<Batch> before_, after_;
  std::vector<std::pair<const ProcessGroup*, at::Tensor>> joins_;  // places of items with copies
  at::Tensor hashes_;
  std::deque<Comparison> latest_;
  int64_t agreed_ = 0;
};

}  // namespace megatron
