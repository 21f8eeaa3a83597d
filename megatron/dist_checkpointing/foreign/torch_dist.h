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

// torch's name of an element type: "float32".
const char* torch_name(DType dtype);

// One checkpoint of a folder, or of the --save folder of Megatron-LM: the newest according to
// latest_checkpointed_iteration.txt, or iteration `step`. Nullopt: no checkpoints of this format.
std::optional<std::filesystem::path> find_torch_dist(const std::filesystem::path& folder,
                                                     std::optional<int64_t> step = {});

struct TorchDistFiles {
  // The wanted tensors under the names and with the shapes of the checkpoint.
  Manifest manifest;
  std::vector<std::string> others;  // names of all other tensors and objects
  Pickle common;                    // a dict
  int64_t iteration = 0;
};

// Opens one checkpoint: reads the metadata, the header of each wanted tensor's items, and the
// common state. Throws Error that names what is damaged, truncated, or not of this format.
TorchDistFiles open_torch_dist(const std::filesystem::path& directory,
                               const std::function<bool(std::string_view key)>& wanted);

// Writes one checkpoint, item by item, like Megatron-LM on one rank. `directory` is created and
// must not contain anything. It is no checkpoint until finish().
class TorchDistWriter {
 public:
  explicit TorchDistWriter(const std::filesystem::path& directory);
  ~TorchDistWriter();
  // Adds a part of a tensor, contiguous. All parts of one tensor must follow one another.
  void add_tensor(const std::string& key, DType dtype, const std::vector<int64_t>& global_shape,
                  const Box& box, const void* data);
  // Adds an empty object, as modules without state have: "key/shard_<offset>_<shape>".
  void add_empty_object(const std::string& key);
  // `common`: a pickled dict (pickle::dict).
  void finish(const std::string& common);
  std::vector<std::string> files() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
