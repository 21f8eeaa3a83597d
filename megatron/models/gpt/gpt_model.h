// Decoder-only transformer: embedding, blocks, final norm, output layer, loss.
#pragma once

#include <memory>

#include "megatron/models/model.h"

namespace megatron {

struct ParallelGroups;

struct GPTConfig {
  TransformerConfig transformer;
  int64_t vocab_size = 0;         // tokens of the tokenizer
  int64_t padded_vocab_size = 0;  // rows of the embedding; at least vocab_size
  bool sequence_parallel = false;
  // The output layer is also split over pipeline stages: each rank of groups.model_parallel holds
  // one part of the vocabulary. Untied output layers only.
  bool pipeline_vocab_parallel = false;
};

// A loss stays a (sum, weight) pair until one division by the weight of every micro-batch and rank.
struct Loss {
  at::Tensor sum;     // [] fp32 (fp64), differentiable
  at::Tensor weight;  // [] fp32 (fp64)
};

// One stage's part of the loss of one micro-batch when the vocabulary is split over the stages.
// Holds the autograd graph between loss() and backward(). The model must outlive it.
class VocabularyPass {
 public:
  virtual ~VocabularyPass() = default;
  // [3, s b] fp32 (fp64): softmax statistics of this rank's logits.
  virtual at::Tensor statistics() const = 0;
  // As GPTModel::loss, from the gathered statistics of all parts, [parts, 3, s b]; not
  // differentiable.
  virtual Loss loss(const at::Tensor& all) = 0;
  // Accumulates the gradient of this part's weight and returns this part's summand of the gradient
  // of the hidden states. `factor`: gradient of Loss::sum. Call once, after loss().
  virtual at::Tensor backward(const at::Tensor& factor) = 0;
};

// Parameters, named as in Megatron's checkpoints: embedding.word_embeddings.weight,
// embedding.position_embeddings.weight, decoder.layers.N...., decoder.final_layernorm.weight|bias,
// output_layer.weight (untied).
class GPTModel : public Model {
 public:
  // The whole model, or one segment; `table` as for make_model().
  GPTModel(const ModelConfig& config, const ParallelGroups& groups);
  GPTModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
           Parameter* table = nullptr);
  ~GPTModel() override;

  using Model::loss;
  at::Tensor hidden(const at::Tensor& tokens, const at::Tensor& input,
                    const ForwardContext& context) override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& loss_mask,
            const at::Tensor& loss_grad) override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const at::Tensor& labels,
                                             const at::Tensor& loss_mask) override;
  Parameter* embedding_table() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
