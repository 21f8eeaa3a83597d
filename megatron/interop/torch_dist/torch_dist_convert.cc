#include "megatron/interop/torch_dist/torch_dist_convert.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/interop/load_model.h"
#include "megatron/interop/torch_dist/torch_dist_arguments.h"
#include "megatron/interop/torch_dist/torch_dist_model.h"
#include "megatron/interop/torch_dist/torch_dist_names.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// The tensor of ours with the values that Megatron-LM has.
void load_whole(const Checkpoint& checkpoint, const std::string& key,
                const TransformerConfig& config, std::vector<std::byte>& memory) {
  const StoredTensor& stored = checkpoint.manifest().tensors.at(key);
  const uint64_t bytes = num_bytes(stored.dtype, stored.shape);
  // Free the old memory first
  if (memory.capacity() < bytes) std::vector<std::byte>().swap(memory);
  memory.resize(bytes);
  ShardedTensor tensor;
  tensor.key = key;
  tensor.dtype = stored.dtype;
  tensor.global_shape = stored.shape;
  tensor.data = memory.data();
  load_one(checkpoint, tensor);
  if (is_stored_from_one(key, config))
    at::from_blob(memory.data(), stored.shape, at::dtype(to_scalar_type(stored.dtype))).sub_(1);
}

// What is in a key: a tensor of ours or rows of it, and its index in a key of all layers.
struct Content {
  std::string name;
  std::optional<int64_t> layer;
  int64_t first_row, rows;  // rows -1: all
};

void write_states(const Content& content, const TransformerConfig& config,
                  TorchDistWriter& writer) {
  if (content.first_row > 0) return;  // once for all rows
  const auto number = [](int64_t value) { return std::to_string(value); };
  for (const TorchDistState& state : torch_dist_states(content.name, config))
    writer.add_empty_object(cat(state.key, "/shard_", listed(state.offset, number, "."), "_",
                                listed(state.global_shape, number, ".")));
}

}  // namespace

ConvertResult import_torch_dist(const TorchDistImport& request, const ConvertProgress& progress) {
  return import_model(
      request.root, request.tokenizer,
      [&](std::optional<int64_t> vocab_size) {
        return open_torch_dist_model(request.directory, request.transformer, vocab_size);
      },
      progress);
}

ConvertResult export_torch_dist(const ExportRequest& request, const ConvertProgress& progress) {
  LoadModelRequest load;
  load.load = request.load;
  load.ckpt_step = request.ckpt_step;
  StoredModel source = open_model(load);
  ModelConfig config = source.config;
  const Manifest& manifest = source.checkpoint.manifest();
  ConvertResult result;
  result.model_type = config.type;
  result.iteration = source.checkpoint.iteration();
  std::map<std::string, std::vector<Content>> stacks;
  std::vector<std::string> order;
  for (const auto& [name, shape] : parameter_shapes(config)) {
    const auto found = manifest.tensors.find(name);
    MEGATRON_CHECK(found != manifest.tensors.end(), source.checkpoint.directory().string(), ": ",
                   name, " is not in the checkpoint, the model of its configuration has it");
    std::vector<TorchDistRows> parts = torch_dist_rows(name, config.transformer);
    if (parts.empty()) parts.push_back({{}, 0, -1});
    for (const TorchDistRows& part : parts) {
      const TorchDistPlace place = torch_dist_place(name, config.transformer, part.part);
      auto& stack = stacks[place.key];
      if (stack.empty()) order.push_back(place.key);
      stack.push_back({name, place.layer, part.first, part.count});
    }
    result.bytes += num_bytes(found->second.dtype, found->second.shape);
  }
  const std::string arguments =
      pickled_arguments(config, manifest.tensors.at("embedding.word_embeddings.weight").dtype);
  std::error_code ignored;
  MEGATRON_CHECK(!fs::exists(request.folder, ignored) || fs::is_empty(request.folder, ignored),
                 request.folder.string(), ": is not empty\nhint: give another --save");
  result.directory = request.folder / checkpoint_name(result.iteration);
  if (progress) progress(result.bytes, 0);
  TorchDistWriter writer(result.directory);
  std::vector<std::byte> memory;
  std::string loaded;  // what is in memory
  for (const std::string& key : order) {
    for (const auto& [name, layer, first_row, rows] : stacks.at(key)) {
      if (loaded != name) load_whole(source.checkpoint, name, config.transformer, memory);
      loaded = name;
      const StoredTensor& stored = manifest.tensors.at(name);
      std::vector<int64_t> shape = stored.shape;
      const uint64_t before = first_row == 0 ? 0
                                             : memory.size() / static_cast<uint64_t>(shape[0]) *
                                                   static_cast<uint64_t>(first_row);
      if (rows >= 0) shape[0] = rows;
      const uint64_t bytes = num_bytes(stored.dtype, shape);
      Box box{std::vector<int64_t>(shape.size(), 0), shape};
      if (layer) {
        shape.insert(shape.begin(), config.transformer.num_layers);
        box.offset.insert(box.offset.begin(), *layer);
        box.shape.insert(box.shape.begin(), 1);
      }
      writer.add_tensor(key, stored.dtype, shape, box, memory.data() + before);
      if (progress) progress(result.bytes, bytes);
    }
  }
  for (const std::string& key : order)
    for (const Content& content : stacks.at(key)) write_states(content, config.transformer, writer);
  const std::pair<std::string, std::string> common[] = {
      {pickle::text("args"), arguments},
      {pickle::text("checkpoint_version"), pickle::number(3.0)},
      {pickle::text("iteration"), pickle::integer(result.iteration)},
      {pickle::text("num_floating_point_operations_so_far"), pickle::integer(0)}};
  writer.finish(pickle::dict(common));
  write_file_atomically(request.folder / kLatestName, cat(result.iteration));
  result.num_tensors = static_cast<int64_t>(order.size());
  result.files = writer.files();
  return result;
}

}  // namespace megatron
