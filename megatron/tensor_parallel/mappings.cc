#include "megatron/tensor_parallel/mappings.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/overlapped_linear.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Map = at::Tensor (*)(const at::Tensor&, const ProcessGroup&, PeerMailbox*);

at::Tensor identity(const at::Tensor& x, const ProcessGroup&, PeerMailbox*) { return x.view_as(x); }

at::Tensor all_reduce(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox*) {
  at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  tp.all_reduce(sum)->wait();
  return sum;
}

at::Tensor own_slice(const at::Tensor& x, int64_t dim, const ProcessGroup& tp) {
  MEGATRON_ASSERT(x.size(dim) % tp.size() == 0, "dimension ", dim, " of size ", x.size(dim),
                  " over ", tp.size(), " ranks");
  const int64_t length = x.size(dim) / tp.size();
  return x.narrow(dim, tp.rank() * length, length).contiguous();
}

at::Tensor own_slice_first_dim(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox*) {
  return own_slice(x, 0, tp);
}
at::Tensor own_slice_last_dim(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox*) {
  return own_slice(x, -1, tp);
}

at::Tensor all_gather_last_dim(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox*) {
  const at::Tensor stacked = all_gather_first_dim(x.unsqueeze(0), tp);  // [t, ..., n]
  return at::cat(stacked.unbind(0), -1);
}

at::Tensor reduce_scatter_last_dim(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox*) {
  const at::Tensor parts = at::stack(x.chunk(tp.size(), -1));  // [t, ..., n/t]
  return reduce_scatter_first_dim(parts, tp).squeeze(0);
}

// Applies one map in the forward and its conjugate in the backward.
struct ConjugatePair : torch::autograd::Function<ConjugatePair> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const ProcessGroup* tp,
                            Map forward_map, Map backward_map, PeerMailbox* mailbox) {
    context->saved_data["tp"] = reinterpret_cast<int64_t>(tp);
    context->saved_data["backward"] = reinterpret_cast<int64_t>(backward_map);
    context->saved_data["mailbox"] = reinterpret_cast<int64_t>(mailbox);
    return forward_map(x, *tp, mailbox);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto* tp = reinterpret_cast<const ProcessGroup*>(context->saved_data["tp"].toInt());
    const auto map = reinterpret_cast<Map>(context->saved_data["backward"].toInt());
    auto* mailbox = reinterpret_cast<PeerMailbox*>(context->saved_data["mailbox"].toInt());
    return {map(grads[0], *tp, mailbox), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor pair(const at::Tensor& x, const ProcessGroup& tp, Map forward_map, Map backward_map,
                PeerMailbox* mailbox = nullptr) {
  if (tp.size() == 1) return x;
  return ConjugatePair::apply(x, &tp, forward_map, backward_map, mailbox);
}

}  // namespace

at::Tensor all_gather_first_dim(const at::Tensor& x, const ProcessGroup& tp, PeerMailbox* mailbox) {
  if (tp.size() == 1) return x;
  GatheredRows rows(x, tp, mailbox);
  const at::Tensor whole = rows.wait();
  return rows.in_parts() ? whole.clone() : whole;  // else it is memory of the mailbox
}

at::Tensor empty_rows(const at::Tensor& x, const ProcessGroup& tp) {
  std::vector<int64_t> shape = x.sizes().vec();
  MEGATRON_ASSERT(shape[0] % tp.size() == 0, "dimension 0 of size ", shape[0], " over ", tp.size(),
                  " ranks");
  shape[0] /= tp.size();
  return at::empty(shape, x.options());
}

at::Tensor reduce_scatter_first_dim(const at::Tensor& x, const ProcessGroup& tp,
                                    PeerMailbox* mailbox) {
  if (tp.size() == 1) return x;
  at::Tensor part = empty_rows(x, tp);
  scatter_rows(x.contiguous(), part, tp, mailbox)->wait();
  return part;
}

at::Tensor copy_to_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp) {
  return pair(x, tp, identity, all_reduce);
}
at::Tensor reduce_from_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp) {
  return pair(x, tp, all_reduce, identity);
}
at::Tensor gather_from_tensor_model_parallel_region(const at::Tensor& x, const ProcessGroup& tp) {
  return pair(x, tp, all_gather_last_dim, own_slice_last_dim);
}
at::Tensor all_gather_last_dim_from_tensor_parallel_region(const at::Tensor& x,
                                                           const ProcessGroup& tp) {
  return pair(x, tp, all_gather_last_dim, reduce_scatter_last_dim);
}
at::Tensor gather_rows_from_tensor_model_parallel_region(const at::Tensor& x,
                                                         const ProcessGroup& tp) {
  return pair(x, tp, all_gather_first_dim, own_slice_first_dim);
}
at::Tensor scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp) {
  return pair(x, tp, own_slice_first_dim, all_gather_first_dim);
}
at::Tensor gather_from_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp) {
  return pair(x, tp, all_gather_first_dim, reduce_scatter_first_dim);
}
at::Tensor reduce_scatter_to_sequence_parallel_region(const at::Tensor& x, const ProcessGroup& tp,
                                                      PeerMailbox* mailbox) {
  return pair(x, tp, reduce_scatter_first_dim, all_gather_first_dim, mailbox);
}

std::function<at::Tensor()> distribute_saved_activation(const at::Tensor& x,
                                                        const ProcessGroup& tp) {
  const int64_t count = x.numel(), part = (count + tp.size() - 1) / tp.size();
  const int64_t begin = std::min(count, tp.rank() * part), end = std::min(count, begin + part);
  const at::Tensor own = at::zeros({part}, x.options());  // the last ranks' parts may be padded
  own.narrow(0, 0, end - begin).copy_(x.detach().reshape({count}).narrow(0, begin, end - begin));
  return [own, count, shape = x.sizes().vec(), tp] {
    return all_gather_first_dim(own, tp).narrow(0, 0, count).view(shape);
  };
}

}  // namespace megatron
