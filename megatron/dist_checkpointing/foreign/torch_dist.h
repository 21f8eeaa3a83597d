// Checkpoints of torch.distributed.checkpoint, as Megatron-LM's `torch_dist` format lays them out:
//
//   metadata.json          {"sharded_backend": "torch_dist", ...}; written last
//   .metadata              a pickle: shape and chunks of every tensor, and file, offset and length
//                          of every item
//   __<rank>_<n>.distcp    items one after the other, each a file of torch.save: a tensor, or a
//                          list with one object
//   common.pt              torch.save of a dict: args, iteration, ...; or the object common_state
//                          in the data files
//
// Pickles are read by dist_checkpointing/foreign/pickle.h: nothing of a checkpoint is executed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/foreign/pickle.h"
#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

inline constexpr const char* kTorchDistMetadata = ".metadata";
inline constexpr const char* kTorchDistConfig = "metadata.json";

// One checkpoint of a folder, or of the folder that --save of Megatron-LM named: the newest by
// latest_checkpointed_iteration.txt, or iteration `step`. None: it holds no checkpoints of this
// format.
std::optional<std::filesystem::path> find_torch_dist(const std::filesystem::path& folder,
                                                     std::optional<int64_t> step = {});

struct TorchDistFiles {
  // The wanted tensors under the names and with the shapes of the checkpoint.
  Manifest manifest;
  std::vector<std::string> others;  // the rest: tensors and objects, by name
  Pickle common;                    // a dict
  int64_t iteration = 0;
};

// Opens one checkpoint: reads the metadata, the head of each wanted tensor's items, and the common
// state. Throws Error naming what is damaged, cut short, or not of this format.
TorchDistFiles open_torch_dist(const std::filesystem::path& directory,
                               const std::function<bool(std::string_view key)>& wanted);

// Writes one checkpoint, item by item, as Megatron-LM on one rank does. `directory` is created and
// must not hold anything. Without finish() it is no checkpoint.
class TorchDistWriter {
 public:
  explicit TorchDistWriter(const std::filesystem::path& directory);
  ~TorchDistWriter();
  // A part of a tensor, contiguous. Parts of one tensor come one after the other.
  void add_tensor(const std::string& key, DType dtype, const std::vector<int64_t>& global_shape,
                  const Box& box, const void* data);
  // An object that holds nothing, as modules without state of their own have:
  // "key/shard_<offset>_<shape>".
  void add_empty_object(const std::string& key);
  // `common`: a pickled dict (pickle::dict).
  void finish(const std::string& common);
  uint64_t bytes() const;  // written so far
  std::vector<std::string> files() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
