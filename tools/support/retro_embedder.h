// The encoder that gives vectors of chunks' texts, for a project of retrieval.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/text_embedder.h"
#include "megatron/interop/load_model.h"
#include "megatron/runtime/device_choice.h"

namespace megatron {

struct RetroEmbedderOptions {
  std::string model;  // a checkpoint or a folder of Hugging Face
  DeviceChoice device = DeviceChoice::kAuto;
  int64_t max_length = 256;  // at most the model's positions
  int64_t batch_tokens = 8192;
  int local_rank = 0;  // within the machine: which GPU
};

LoadModelRequest embedder_request(const RetroEmbedderOptions& options);

class RetroEmbedder {
 public:
  explicit RetroEmbedder(const RetroEmbedderOptions& options);
  int64_t width() const;
  // As EmbedTexts, by mean pooling. In fp32 and fp64 on a CPU its bits depend on the text alone,
  // not on threads, batches or ranks.
  std::vector<float> embed(std::span<const std::string> texts);
  // What vectors depend on: the hash of the weights, the length.
  nlohmann::json facts() const;

 private:
  ParallelGroups groups_;  // outlives the model
  LoadedModel model_;
  bool invariant_;  // the forward has a batch-invariant form, which is taken
  EmbedOptions options_;
  std::unique_ptr<TextEmbedder> embedder_;
};

}  // namespace megatron
