#include "megatron/models/common/shifted_batch.h"

#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

at::Tensor rolled_left(const at::Tensor& column, int64_t by, const at::Tensor& document_ids) {
  const int64_t s = column.size(-1), kept = std::max<int64_t>(0, s - by);
  at::Tensor later = column.narrow(-1, s - kept, kept);
  if (document_ids.defined()) {
    const at::Tensor same =
        document_ids.narrow(-1, 0, kept) == document_ids.narrow(-1, s - kept, kept);
    later = at::where(same, later, at::zeros({}, column.options()));
  }
  return at::constant_pad_nd(later, {0, s - kept});
}

ShiftedBatch::ShiftedBatch(const Batch& batch, const ProcessGroup& cp)
    : cp_(cp), document_ids_(batch.document_ids) {
  const at::Tensor &tokens = batch["tokens"], &labels = batch["labels"];
  check_shape("labels", labels, {tokens.size(0), tokens.size(1)});
  check_shape("loss_mask", batch["loss_mask"], {tokens.size(0), tokens.size(1)});
  at::Tensor position_ids = batch.find("position_ids");
  if (!position_ids.defined()) position_ids = batch.place.position.expand_as(tokens);
  std::vector<at::Tensor> integers = {tokens, labels, position_ids};
  if (batch.padding.defined()) integers.push_back(batch.padding.to(at::kLong));
  integers_ = zigzag_gather(at::stack(integers, 1), 2, cp);
  loss_mask_ = zigzag_gather(batch["loss_mask"], 1, cp);
  weight_ = loss_mask_.sum(1, false, at::kDouble);
}

ShiftedColumns ShiftedBatch::at(int64_t by) const {
  const auto own = [&](const at::Tensor& whole) {
    return zigzag_slice(rolled_left(whole, by, document_ids_), 1, cp_);
  };
  ShiftedColumns out;
  out.tokens = own(integers_.select(1, 0));
  out.labels = own(integers_.select(1, 1));
  out.position_ids = own(integers_.select(1, 2));
  if (integers_.size(1) > 3) out.padding = own(integers_.select(1, 3)).to(at::kBool);
  out.loss_mask = own(loss_mask_);
  const at::Tensor weight = rolled_left(loss_mask_, by, document_ids_).sum(1, false, at::kDouble);
  out.weight_ratio = at::where(weight > 0, weight_ / weight, at::zeros({}, weight.options()));
  return out;
}

}  // namespace megatron
