#include "tools/support/retro_embedder.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/inference/generator.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/batch_invariant/mode_scope.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/batch_invariant.h"

namespace megatron {
namespace {

// Differs for other weights.
std::string hash_of(Model& model) {
  std::string hashes;
  model.visit([&](const std::string& path, const Parameter& parameter) {
    const at::Tensor value = parameter.value.to(at::kCPU).contiguous();
    hashes +=
        cat(path, " ",
            hash_text({static_cast<const char*>(value.const_data_ptr()), value.nbytes()}), "\n");
  });
  return hash_text(hashes);
}

// The process may hold another model, whose mode load_model() would change.
LoadedModel load_embedder(const RetroEmbedderOptions& options, const ParallelGroups& groups) {
  const BatchInvariantScope kept(is_batch_invariant());
  return load_model(embedder_request(options), groups);
}

bool has_invariant_form(const LoadedModel& loaded) {
  Violations violations;
  validate_batch_invariant(loaded.config.transformer, violations);
  const auto& value = loaded.model->parameters().front()->value;
  return violations.empty() && value.is_cpu() &&
         (value.scalar_type() == at::kFloat || value.scalar_type() == at::kDouble);
}

}  // namespace

LoadModelRequest embedder_request(const RetroEmbedderOptions& options) {
  LoadModelRequest request;
  request.load = options.model;
  request.device = choose_device(options.device, options.local_rank);
  return request;
}

RetroEmbedder::RetroEmbedder(const RetroEmbedderOptions& options)
    : model_(load_embedder(options, groups_)), invariant_(has_invariant_form(model_)) {
  for (const std::string& warning : model_.warnings) log_warning(warning);
  const int64_t positions = max_positions(model_.config);
  options_.max_length =
      positions < 0 ? options.max_length : std::min(positions, options.max_length);
  options_.batch_tokens = options.batch_tokens;
  embedder_ = std::make_unique<TextEmbedder>(*model_.model, *model_.tokenizer, options_);
}

int64_t RetroEmbedder::width() const { return model_.config.transformer.hidden_size; }

std::vector<float> RetroEmbedder::embed(std::span<const std::string> texts) {
  const BatchInvariantScope scope(invariant_ || is_batch_invariant());
  const at::Tensor vectors = embedder_->embed(texts).contiguous();
  const float* data = vectors.const_data_ptr<float>();
  return {data, data + vectors.numel()};
}

nlohmann::json RetroEmbedder::facts() const {
  return {{"embedder", hash_of(*model_.model)}, {"embedder_max_length", options_.max_length}};
}

}  // namespace megatron
