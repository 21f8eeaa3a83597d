// Decoder-only transformer: embedding, blocks, final norm, output layer, loss.
#pragma once

#include <memory>

#include "megatron/nn/module.h"
#include "megatron/nn/recompute.h"
#include "megatron/transformer/forward_context.h"
#include "megatron/transformer/transformer_config.h"

namespace megatron {

struct ParallelGroups;

struct GPTConfig {
  TransformerConfig transformer;
  int64_t vocab_size = 0;         // of the tokenizer
  int64_t padded_vocab_size = 0;  // rows of the embedding; at least vocab_size
};

// A loss stays a (sum, weight) pair until one division by the weight of every micro-batch and rank.
struct Loss {
  at::Tensor sum;     // [] fp32 (fp64), differentiable
  at::Tensor weight;  // [] fp32 (fp64)
};

// Parameters (contracts o): embedding.word_embeddings.weight, embedding.position_embeddings.weight,
// decoder.layers.N...., decoder.final_layernorm.weight|bias, output_layer.weight (untied).
class GPTModel : public Module {
 public:
  // Declares the parameters; memory comes from a ParameterStore. `groups` must outlive the model.
  GPTModel(const GPTConfig& config, const ParallelGroups& groups);
  ~GPTModel() override;

  // Logits. Differentiable in the parameters; with a tape in the context, blocks may be recomputed.
  //   tokens   [b, s] int64
  //   return   [s, b, v/t] in the model's type; columns of vocabulary padding are unspecified
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context);

  // Sum of the per-token losses times their mask, and the sum of the mask.
  //   tokens, labels  [b, s] int64;  loss_mask [b, s] fp32
  Loss loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
            const ForwardContext& context);

  const GPTConfig& config() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
