#include "megatron/models/common/vocabulary_pass.h"

#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"

namespace megatron {

namespace {

class SplitVocabularyPass final : public VocabularyPass {
 public:
  SplitVocabularyPass(Model& model, const ProcessGroup& ranks, const at::Tensor& hidden,
                      const at::Tensor& labels, const at::Tensor& loss_mask) {
    at::Tensor start = hidden.detach();
    if (at::GradMode::is_enabled()) hidden_ = BackwardEnd(start);
    const at::Tensor logits = model.logits(start);
    const ModelConfig& config = model.config();
    entropy_ =
        std::make_unique<SplitCrossEntropy>(logits, labels.t().contiguous(), config.vocab_size,
                                            config.transformer.z_loss_coeff, ranks.rank());
    mask_ = loss_mask.t().to(entropy_->statistics().scalar_type());
    if (at::GradMode::is_enabled()) logits_ = BackwardRoot(logits);
  }

  at::Tensor statistics() const override { return entropy_->statistics(); }
  Loss loss(const at::Tensor& all) override {
    const at::Tensor per_token = entropy_->loss(all);
    return {(per_token * mask_).sum(), mask_.sum()};
  }
  at::Tensor backward(const at::Tensor& factor) override {
    logits_.run(entropy_->backward(mask_ * factor));
    return hidden_.take_grad();
  }

 private:
  BackwardEnd hidden_;
  BackwardRoot logits_;
  std::unique_ptr<SplitCrossEntropy> entropy_;
  at::Tensor mask_;  // [s, b]
};

}  // namespace

std::unique_ptr<VocabularyPass> split_vocabulary_pass(Model& model, const ProcessGroup& ranks,
                                                      const at::Tensor& hidden,
                                                      const at::Tensor& labels,
                                                      const at::Tensor& loss_mask) {
  check_shape("loss_mask", loss_mask, {labels.size(0), labels.size(1)});
  return std::make_unique<SplitVocabularyPass>(model, ranks, hidden, labels, loss_mask);
}

}  // namespace megatron
