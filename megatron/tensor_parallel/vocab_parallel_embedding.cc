#include "megatron/tensor_parallel/vocab_parallel_embedding.h"

#include "megatron/base/check.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/embedding.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Looks up rows of the parameter; ids outside [0, rows) are negative here and give zeros.
struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& ids, const at::Tensor&,
                            Parameter* parameter) {
    const AcquiredValue weight(parameter);
    context->saved_data["parameter"] = reinterpret_cast<int64_t>(parameter);
    context->save_for_backward({ids});
    return embedding_forward(weight.value(), ids);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    auto* parameter = reinterpret_cast<Parameter*>(context->saved_data["parameter"].toInt());
    if (parameter->trainable) {
      const GradTarget target = parameter->store->grad_target(*parameter);
      embedding_backward(grads[0].contiguous(), context->get_saved_variables()[0],
                         target.to_add_to());
      parameter->store->grad_ready(*parameter);
    }
    return {at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// An id outside the table would read foreign memory. Checked only where that costs no
// synchronisation: on the CPU.
void check_ids(const char* what, const at::Tensor& ids, int64_t rows) {
  if (!ids.device().is_cpu() || ids.numel() == 0) return;
  const auto [low, high] = at::aminmax(ids);
  int64_t least = low.item<int64_t>();
  const int64_t most = high.item<int64_t>();
  if (least == kNoToken) least = ids.masked_fill(ids == kNoToken, 0).min().item<int64_t>();
  MEGATRON_CHECK(least >= 0 && most < rows, what, " ", least < 0 ? least : most,
                 " is outside the embedding of ", rows, " rows");
}

}  // namespace

VocabParallelEmbedding::VocabParallelEmbedding(int64_t vocab_size, int64_t padded_vocab_size,
                                               int64_t hidden_size, Init init,
                                               bool sequence_parallel, const ParallelGroups& groups)
    : sequence_parallel_(sequence_parallel), tp_(groups.tp), mailbox_(groups.tp.mailbox()) {
  MEGATRON_CHECK(padded_vocab_size >= vocab_size && padded_vocab_size % tp_.size() == 0,
                 "padded vocabulary of ", padded_vocab_size, " rows: expected at least ",
                 vocab_size, " and a multiple of ", tp_.size(), " tensor-parallel ranks");
  weight_.local_shape = {padded_vocab_size / tp_.size(), hidden_size};
  weight_.global_shape = {padded_vocab_size, hidden_size};
  weight_.valid_rows = vocab_size;
  weight_.placement.shards = {{0, Axis::kTensor, {}}};
  weight_.init = init;
  weight_.role = ParameterRole::kEmbedding;
  add("weight", &weight_);
}

VocabParallelEmbedding::VocabParallelEmbedding(Parameter& table, bool sequence_parallel,
                                               const ParallelGroups& groups)
    : table_(&table),
      sequence_parallel_(sequence_parallel),
      tp_(groups.tp),
      mailbox_(groups.tp.mailbox()) {}

at::Tensor VocabParallelEmbedding::forward(const at::Tensor& ids) {
  check_ids("token id", ids, table_->global_shape[0]);
  at::Tensor local = ids.t().contiguous();  // [s, b]
  if (tp_.size() > 1) {
    const int64_t rows = table_->local_shape[0];
    local = local - tp_.rank() * rows;
    local = at::where((local >= 0).logical_and(local < rows), local, at::full_like(local, -1));
  }
  const at::Tensor rows = EmbeddingFunction::apply(local, anchor(), table_);
  return sequence_parallel_ ? reduce_scatter_to_sequence_parallel_region(rows, tp_, mailbox_.get())
                            : reduce_from_tensor_model_parallel_region(rows, tp_);
}

Embedding::Embedding(int64_t rows, int64_t hidden_size, Init init) {
  weight_.local_shape = weight_.global_shape = {rows, hidden_size};
  weight_.init = init;
  weight_.role = ParameterRole::kEmbedding;
  add("weight", &weight_);
}

void Embedding::set_sequence_parallel(bool sequence_parallel) {
  if (sequence_parallel) weight_.placement.partial_grad.insert(Axis::kTensor);
}

at::Tensor Embedding::forward(const at::Tensor& ids) {
  check_ids("id", ids, table_->global_shape[0]);
  // Of a frozen table autograd has nothing to compute.
  const c10::AutoGradMode recorded(at::GradMode::is_enabled() && table_->trainable);
  return EmbeddingFunction::apply(ids.contiguous(), anchor(), table_);
}

}  // namespace megatron
