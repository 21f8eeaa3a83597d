// Ring attention: each rank attends to the keys and values it holds while sending them on.
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/attention/attention_block.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/context_parallel/detail/context_parallel.h"

namespace megatron {
namespace {

// Sends to the next rank of the ring and receives from the one before it. Even ranks send first and
// odd ones receive first, so that a transport that serialises a rank's messages (NCCL) cannot
// deadlock with all ranks waiting to send.
class RingShift {
 public:
  RingShift(const ProcessGroup& cp, const at::Tensor& out, const at::Tensor& in) {
    const int next = (cp.rank() + 1) % cp.size(),
              previous = (cp.rank() + cp.size() - 1) % cp.size();
    const bool send_first = cp.rank() % 2 == 0;
    if (send_first) send_ = cp.send(out, next);
    receive_ = cp.recv(in, previous);
    if (!send_first) send_ = cp.send(out, next);
  }
  void wait() {
    send_->wait();
    receive_->wait();
  }

 private:
  std::shared_ptr<Work> send_, receive_;
};

// Which local queries attend to which of a peer's keys: queries from `first_query` on, to the first
// `num_keys` keys.
struct Meeting {
  int64_t first_query, num_queries, num_keys;
  bool causal;
};

// With zig-zag chunks (r, 2c - 1 - r) the causal work of one step is: own keys, the causal
// triangle; keys of an earlier rank, all queries with its first chunk; keys of a later rank, the
// second chunk of queries with all keys. Each is half of the square, and nothing masked is
// computed.
Meeting meet(bool causal, int64_t rank, int64_t peer, int64_t local) {
  if (!causal || peer == rank) return {0, local, local, causal};
  if (peer < rank) return {0, local, local / 2, false};
  return {local / 2, local / 2, local, false};
}

class Ring {
 public:
  Ring(const ContextParallelPass& pass, const at::Tensor& q)
      : pass_(pass),
        causal_(pass.options.causal),
        c_(pass.cp.size()),
        rank_(pass.cp.rank()),
        local_(q.size(0)) {
    for (int64_t r = 0; pass.by_place() && r < c_; ++r)
      positions_.push_back(zigzag_positions(local_ * c_, c_, r, q.device()));
  }

  // The rank whose keys this rank holds at this step.
  int64_t peer(int64_t step) const { return (rank_ - step + c_) % c_; }
  Meeting meeting(int64_t step) const { return meet(causal_, rank_, peer(step), local_); }
  AttentionOptions options(int64_t step) const {
    const Meeting m = meeting(step);
    if (positions_.empty()) return pass_.block(m.causal, {}, {});
    return pass_.block(
        m.causal, positions_[static_cast<size_t>(rank_)].narrow(0, m.first_query, m.num_queries),
        positions_[static_cast<size_t>(peer(step))].narrow(0, 0, m.num_keys));
  }

  // The merged output in fp32 (fp64) and its log-sum-exp.
  AttentionBlock forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    Packed here = Packed::copy({k, v}), arriving({k, v}, k.scalar_type());
    AttentionBlock total;
    for (int64_t step = 0; step < c_; ++step) {
      std::optional<RingShift> shift;
      if (step + 1 < c_) shift.emplace(pass_.cp, here.flat, arriving.flat);
      const Meeting m = meeting(step);
      const AttentionBlock block = attention_block_forward(
          q.narrow(0, m.first_query, m.num_queries), here.parts[0].narrow(0, 0, m.num_keys),
          here.parts[1].narrow(0, 0, m.num_keys), options(step));
      if (step == 0) {
        total = {block.out.to(block.lse.scalar_type()), block.lse};
      } else {
        add_attention_block({total.out.narrow(0, m.first_query, m.num_queries),
                             total.lse.narrow(2, m.first_query, m.num_queries)},
                            block);
      }
      if (!shift) continue;
      shift->wait();
      std::swap(here, arriving);
    }
    if (pass_.options.sinks.defined()) add_attention_sinks(total, pass_.options.sinks);
    return total;
  }

  // A second ring: the gradients of a rank's keys and values follow them in fp32 (fp64), each rank
  // adds its part, and the last shift returns them to their owner. The sum is in ring order, so it
  // is the same in every run.
  torch::autograd::variable_list backward(const at::Tensor& dout, const at::Tensor& q,
                                          const at::Tensor& k, const at::Tensor& v,
                                          const at::Tensor& out, const at::Tensor& lse) const {
    Packed here = Packed::copy({k, v}), arriving({k, v}, k.scalar_type());
    Packed grads({k, v}, lse.scalar_type()), grads_arriving({k, v}, lse.scalar_type());
    at::Tensor dq;
    std::optional<RingShift> grad_shift;
    for (int64_t step = 0; step < c_; ++step) {
      std::optional<RingShift> shift;
      if (step + 1 < c_) shift.emplace(pass_.cp, here.flat, arriving.flat);
      const Meeting m = meeting(step);
      const auto rows = [&](const at::Tensor& t) {
        return t.narrow(0, m.first_query, m.num_queries);
      };
      const auto [dq_block, dk_block, dv_block] =
          attention_block_backward(rows(dout), rows(q), here.parts[0].narrow(0, 0, m.num_keys),
                                   here.parts[1].narrow(0, 0, m.num_keys), rows(out),
                                   lse.narrow(2, m.first_query, m.num_queries), options(step));
      if (grad_shift) {
        grad_shift->wait();
        std::swap(grads, grads_arriving);
      }
      const at::Tensor dk = grads.parts[0].narrow(0, 0, m.num_keys),
                       dv = grads.parts[1].narrow(0, 0, m.num_keys);
      if (step == 0) {
        dq = dq_block.to(lse.scalar_type());
        dk.copy_(dk_block);
        dv.copy_(dv_block);
      } else {
        rows(dq).add_(dq_block);
        dk.add_(dk_block);
        dv.add_(dv_block);
      }
      grad_shift.emplace(pass_.cp, grads.flat, grads_arriving.flat);
      if (!shift) continue;
      shift->wait();
      std::swap(here, arriving);
    }
    grad_shift->wait();
    return {dq.to(q.scalar_type()), grads_arriving.parts[0].to(k.scalar_type()),
            grads_arriving.parts[1].to(v.scalar_type())};
  }

 private:
  const ContextParallelPass& pass_;
  bool causal_;
  int64_t c_, rank_, local_;
  std::vector<at::Tensor> positions_;  // token positions of each rank, if by_place()
};

struct SavedRingPass : torch::CustomClassHolder {
  ContextParallelPass pass;
};

class RingAttention : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>&, const ContextParallelPass& pass) {
    auto saved = c10::make_intrusive<SavedRingPass>();
    saved->pass = pass;
    const AttentionBlock total = Ring(pass, q).forward(q, k, v);
    const at::Tensor out = total.out.to(q.scalar_type()).contiguous();
    torch::autograd::variable_list tensors = {q, k, v};
    if (!pass.options.recompute) tensors.insert(tensors.end(), {out, total.lse});
    context->save_for_backward(tensors);
    context->saved_data["pass"] = c10::IValue::make_capsule(saved);
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved =
        c10::static_intrusive_pointer_cast<SavedRingPass>(context->saved_data["pass"].toCapsule());
    torch::autograd::variable_list t = context->get_saved_variables();
    const at::NoGradGuard no_grad;
    const Ring ring(saved->pass, t[0]);
    if (t.size() == 3) {
      const AttentionBlock total = ring.forward(t[0], t[1], t[2]);
      t.insert(t.end(), {total.out.to(t[0].scalar_type()), total.lse});
    }
    torch::autograd::variable_list result = ring.backward(grads[0], t[0], t[1], t[2], t[3], t[4]);
    const at::Tensor& sinks = saved->pass.options.sinks;
    result.push_back(sinks.defined() ? attention_sinks_grad(grads[0], t[3], t[4], sinks)
                                     : at::Tensor());
    result.emplace_back();
    return result;
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options, const at::Tensor& document_ids,
                          const ProcessGroup& cp) {
  MEGATRON_CHECK(options.window_left < 0 && (options.causal || options.window_right < 0),
                 "--window-size cannot be used with the ring of --cp-comm-type p2p or a2a+p2p",
                 "\nhint: --cp-comm-type all_gather or a2a");
  MEGATRON_CHECK(!options.distance_bias.defined(),
                 "relative positions with the ring of --cp-comm-type p2p or a2a+p2p are not built",
                 "\nhint: --cp-comm-type all_gather or a2a");
  return RingAttention::apply(q, k, v, std::optional<at::Tensor>(options.sinks),
                              ContextParallelPass{options, document_ids, cp});
}

}  // namespace megatron
