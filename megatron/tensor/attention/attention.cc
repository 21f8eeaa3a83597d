#include "megatron/tensor/attention/attention.h"

#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/tensor/attention/attention_block.h"
#include "megatron/tensor/attention/ordered_attention.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/detail/attention_distance.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/detail/attention_masked.h"
#include "megatron/tensor/detail/attention_rows.h"
#include "megatron/tensor/detail/attention_unfused.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

enum class Path { kFlashCpu, kFlashCuda, kCudnn, kDistance, kMasked, kUnfused, kRows, kOrdered };

// Whether the backward writes gradients with the strides that it is given.
bool writes_views(Path path) { return path == Path::kCudnn || path == Path::kDistance; }

// What the backward needs of its forward; empty for the unfused path without sinks, which computes
// probabilities again.
struct Forward {
  at::Tensor out;  // [s, b, n, d], contiguous
  at::Tensor library_out, lse, seed, offset, cu_q, cu_k;
};

bool library_causal(const at::Tensor& q, const AttentionOptions& o) {
  return o.causal && q.size(0) > 1;
}

// Why not cuDNN, or "". `by_name`: requested explicitly, so any sequence length is accepted.
std::string why_not_fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& o, bool by_name) {
  if (!q.is_cuda()) return "it needs a CUDA device";
  std::string reason = why_unfused(q, k, v, o, /*knows_windows=*/true);
  if (!reason.empty()) return reason;
  if (q.size(0) != k.size(0) && !why_unfused(q, k, v, o).empty())
    return "a sliding window over keys before the queries";
  if (!by_name && (q.size(0) != k.size(0) || q.size(0) % 64 != 0))
    return "the length is not a multiple of 64";
  return why_not_cudnn(to_heads(q), to_heads(k), to_heads(v), o);
}

Path choose_path(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const AttentionOptions& o) {
  const auto check = [&](const std::string& reason, const char* name) {
    MEGATRON_CHECK(reason.empty(), "--attention-backend ", name,
                   " cannot compute this attention: ", reason,
                   "\nhint: --attention-backend auto takes a backend that can");
  };
  if (is_batch_invariant()) {
    const std::string reason = q.is_cuda() ? why_not_ordered(q, k, v, o) : why_not_rows(o);
    MEGATRON_CHECK(reason.empty(),
                   "--batch-invariant-mode cannot compute this attention: ", reason);
    return q.is_cuda() ? Path::kOrdered : Path::kRows;
  }
  switch (o.backend) {
    case AttentionBackend::kUnfused:
    case AttentionBackend::kLocal:
      return Path::kUnfused;
    case AttentionBackend::kFused:
      check(why_not_fused(q, k, v, o, /*by_name=*/true), "fused");
      return Path::kCudnn;
    case AttentionBackend::kFlash:
      check(why_unfused(q, k, v, o), "flash");
      return q.is_cuda() ? Path::kFlashCuda : Path::kFlashCpu;
    case AttentionBackend::kAuto:
      break;
  }
  if (why_not_distance_kernel(q, k, v, o).empty()) return Path::kDistance;
  if (q.is_cuda() && why_not_fused(q, k, v, o, /*by_name=*/false).empty()) return Path::kCudnn;
  if (why_not_masked_kernel(q, k, v, o).empty()) return Path::kMasked;
  if (!why_unfused(q, k, v, o).empty()) return Path::kUnfused;
  return q.is_cuda() ? Path::kFlashCuda : Path::kFlashCpu;
}

// Another kernel's, where a forward has none of its own.
Path backward_path(Path forward, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const AttentionOptions& o) {
  if (forward != Path::kOrdered) return forward;
  return why_not_fused(q, k, v, o, /*by_name=*/true).empty() ? Path::kCudnn : Path::kRows;
}

// Each key group repeated for its query heads, [s_k, b, n, d]: the CPU kernel has no grouped heads.
at::Tensor repeat_groups(const at::Tensor& t, int64_t heads) {
  if (t.size(2) == heads) return t;
  const int64_t r = heads / t.size(2);
  return t.unsqueeze(3)
      .expand({-1, -1, -1, r, -1})
      .reshape({t.size(0), t.size(1), heads, t.size(3)});
}

at::Tensor sum_groups(const at::Tensor& grad, int64_t groups) {
  if (grad.size(2) == groups) return grad;
  return grad.reshape({grad.size(0), grad.size(1), groups, grad.size(2) / groups, grad.size(3)})
      .sum(3);
}

// Additive mask for the CPU kernel if its own causal mask does not apply.
std::optional<at::Tensor> cpu_mask(const at::Tensor& q, const at::Tensor& k,
                                   const AttentionOptions& o) {
  if (library_mask_fits(q, k, o)) return std::nullopt;
  const at::Tensor mask = attention_mask(q, k, o);
  return at::zeros(mask.sizes(), q.options())
      .masked_fill_(mask, -std::numeric_limits<double>::infinity());
}

// Adds the sinks, if there are any, to what a library's kernel computed.
void add_sinks(const Forward& f, const AttentionOptions& o) {
  if (!o.sinks.defined()) return;
  const at::Tensor rows = f.lse.view(f.library_out.sizes().slice(0, 3));
  add_attention_sinks({from_heads(f.library_out), rows}, o.sinks);
}

Forward run_forward(Path path, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const AttentionOptions& o) {
  const at::NoGradGuard no_grad;
  Forward f;
  const bool causal = library_causal(q, o);
  switch (path) {
    case Path::kUnfused: {
      if (!o.sinks.defined()) {
        f.out = unfused_attention(q, k, v, o);
        return f;
      }
      const AttentionBlock block = unfused_block(q, k, v, o);
      add_attention_sinks(block, o.sinks);
      f.out = block.out.to(q.scalar_type());
      f.library_out = to_heads(f.out);
      f.lse = block.lse;
      return f;
    }
    case Path::kRows:
    case Path::kOrdered: {
      const auto forward = path == Path::kRows ? rows_attention : ordered_attention;
      const AttentionBlock block = forward(q, k, v, o);
      f.out = block.out;
      f.library_out = to_heads(f.out);
      f.lse = block.lse;
      return f;
    }
    case Path::kFlashCpu: {
      const int64_t heads = q.size(2);
      const auto mask = cpu_mask(q, k, o);
      std::tie(f.library_out, f.lse) = at::_scaled_dot_product_flash_attention_for_cpu(
          to_heads(q), to_heads(repeat_groups(k, heads)),
          to_heads(repeat_groups(padded(v, q.size(3)), heads)), 0.0, causal && !mask.has_value(),
          mask, o.scale);
      break;
    }
    case Path::kFlashCuda: {
      auto r = at::_scaled_dot_product_flash_attention(
          to_heads(q), to_heads(k), to_heads(padded(v, q.size(3))), 0.0, causal, false, o.scale);
      f.library_out = std::get<0>(r);
      f.lse = std::get<1>(r);
      f.cu_q = std::get<2>(r);
      f.cu_k = std::get<3>(r);
      f.seed = std::get<6>(r);
      f.offset = std::get<7>(r);
      break;
    }
    case Path::kDistance: {
      f.out = at::empty(q.sizes(), q.options());
      f.lse = distance_attention_forward(q, k, v, f.out, o);
      f.library_out = to_heads(f.out);
      return f;
    }
    case Path::kMasked: {
      MaskedAttention r = masked_attention_forward(q, k, v, o);
      f.out = r.out.transpose(0, 1).contiguous();
      f.library_out = std::move(r.out);
      f.lse = std::move(r.lse);
      f.seed = std::move(r.seed);
      f.offset = std::move(r.offset);
      return f;
    }
    case Path::kCudnn: {
      f.out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
      f.library_out = to_heads(f.out);
      f.lse = cudnn_attention_forward(to_heads(q), to_heads(k), to_heads(v), f.library_out, o);
      add_sinks(f, o);
      // A view is not saved for the backward after its tensor has changed.
      f.library_out = to_heads(f.out);
      return f;
    }
  }
  add_sinks(f, o);
  f.out = from_heads(f.library_out).narrow(3, 0, v.size(3)).contiguous();
  return f;
}

using Grads = AttentionGrads;

// Assigns the gradients, and adds that of the bias to `dbias`, undefined without one. Where
// writes_views(), with the caller's strides, else with their own.
void run_backward(Path path, const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                  const at::Tensor& v, const Forward& f, const AttentionOptions& o, Grads& grads,
                  const at::Tensor& dbias) {
  if (path == Path::kRows || (path == Path::kUnfused && o.sinks.defined())) {
    const auto [dq, dk, dv] = unfused_block_backward(
        dout, q, k, v, from_heads(f.library_out), f.lse.view(f.library_out.sizes().slice(0, 3)), o);
    grads = {dq.to(q.scalar_type()), dk.to(q.scalar_type()), dv.to(q.scalar_type())};
    return;
  }
  if (path == Path::kUnfused) {
    grads = unfused_attention_backward(dout, q, k, v, o, dbias);
    return;
  }
  if (path == Path::kMasked) {
    grads = masked_attention_backward(dout, q, k, v, {f.library_out, f.lse, f.seed, f.offset}, o);
    return;
  }
  if (writes_views(path)) {
    auto& [dq, dk, dv] = grads;
    for (auto [grad, input] : {std::pair{&dq, &q}, {&dk, &k}, {&dv, &v}}) {
      if (!grad->defined()) *grad = at::empty(input->sizes(), input->options());
    }
    if (path == Path::kDistance)
      return distance_attention_backward(dout, q, k, v, from_heads(f.library_out), f.lse, grads,
                                         dbias, o);
    const at::Tensor last_contiguous = dout.stride(-1) == 1 ? dout : dout.contiguous();
    cudnn_attention_backward(to_heads(last_contiguous), to_heads(q), to_heads(k), to_heads(v),
                             f.library_out, f.lse, to_heads(dq), to_heads(dk), to_heads(dv), o);
    return;
  }
  const bool causal = library_causal(q, o);
  const at::Tensor wide_grad = padded(dout, q.size(3)), wide_values = padded(v, q.size(3));
  if (path == Path::kFlashCpu) {
    const int64_t heads = q.size(2), groups = k.size(2);
    const auto mask = cpu_mask(q, k, o);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        to_heads(wide_grad), to_heads(q), to_heads(repeat_groups(k, heads)),
        to_heads(repeat_groups(wide_values, heads)), f.library_out, f.lse, 0.0,
        causal && !mask.has_value(), mask, o.scale);
    grads = {from_heads(dq), sum_groups(from_heads(dk), groups),
             sum_groups(from_heads(dv), groups).narrow(3, 0, v.size(3))};
    return;
  }
  const DeterministicScope deterministic;
  const Grads found = at::_scaled_dot_product_flash_attention_backward(
      to_heads(wide_grad), to_heads(q), to_heads(k), to_heads(wide_values), f.library_out, f.lse,
      f.cu_q, f.cu_k, q.size(0), k.size(0), 0.0, causal, f.seed, f.offset, o.scale);
  grads = {from_heads(std::get<0>(found)), from_heads(std::get<1>(found)),
           from_heads(std::get<2>(found)).narrow(3, 0, v.size(3))};
}

// The gradient of the sinks; undefined without them.
at::Tensor sinks_grad(const at::Tensor& dout, const Forward& f, const AttentionOptions& o) {
  if (!o.sinks.defined()) return {};
  const at::Tensor out = from_heads(f.library_out).narrow(3, 0, dout.size(3));
  return attention_sinks_grad(dout, out, f.lse.view(f.library_out.sizes().slice(0, 3)), o.sinks);
}

// Where the gradient of the bias is added up; undefined without one.
at::Tensor zero_bias_grad(const AttentionOptions& o) {
  return o.distance_bias.defined()
             ? at::zeros_like(o.distance_bias, {}, at::MemoryFormat::Contiguous)
             : at::Tensor();
}

// Carries the options through autograd's context.
struct SavedOptions : torch::CustomClassHolder {
  AttentionOptions options;
  Path path = Path::kUnfused, backward = Path::kUnfused;
};

// Saves what the backward needs of a library's forward beyond its inputs; nothing if it is
// recomputed.
void save(const Forward& f, const SavedOptions& saved, torch::autograd::variable_list& tensors) {
  if (saved.path == Path::kUnfused || saved.options.recompute) return;
  tensors.insert(tensors.end(), {f.library_out, f.lse, f.seed, f.offset, f.cu_q, f.cu_k});
}

// Restores it from tensors[first...], or recomputes the forward.
Forward saved_forward(const torch::autograd::variable_list& tensors, size_t first,
                      const SavedOptions& saved, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v) {
  if (saved.path == Path::kUnfused && !saved.options.sinks.defined()) return {};
  if (tensors.size() == first) return run_forward(saved.path, q, k, v, saved.options);
  const auto t = tensors.begin() + static_cast<std::ptrdiff_t>(first);
  return {at::Tensor(), t[0], t[1], t[2], t[3], t[4], t[5]};
}

// The sinks and the bias are also arguments of their own, which autograd sees.
class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const AttentionOptions& options) {
    auto saved = c10::make_intrusive<SavedOptions>();
    saved->options = options;
    saved->path = choose_path(q, k, v, options);
    saved->backward = backward_path(saved->path, q, k, v, options);
    Forward f = run_forward(saved->path, q, k, v, saved->options);
    torch::autograd::variable_list tensors = {q, k, v};
    save(f, *saved, tensors);
    context->save_for_backward(tensors);
    context->saved_data["options"] = c10::IValue::make_capsule(saved);
    return f.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto holder = c10::static_intrusive_pointer_cast<SavedOptions>(
        context->saved_data["options"].toCapsule());
    const auto t = context->get_saved_variables();
    const at::NoGradGuard no_grad;
    Grads result;
    const Forward f = saved_forward(t, 3, *holder, t[0], t[1], t[2]);
    const at::Tensor dbias = zero_bias_grad(holder->options);
    run_backward(holder->backward, grads[0], t[0], t[1], t[2], f, holder->options, result, dbias);
    return {std::get<0>(result),
            std::get<1>(result),
            std::get<2>(result),
            sinks_grad(grads[0], f, holder->options),
            dbias,
            {}};
  }
};

// Views of the queries, keys and values of [s, b, g, r + 2, d]. Library kernels treat each group as
// a separate sample, [s, b * g, r, d], whose strides are regular; paths that number heads, for
// dropout or a bias of each, take [s, b, g * r, d].
struct QKV {
  QKV(const at::Tensor& packed, Path path) {
    const int64_t s = packed.size(0), b = packed.size(1), g = packed.size(2),
                  r = packed.size(3) - 2, d = packed.size(4);
    if (path == Path::kUnfused || path == Path::kDistance || path == Path::kMasked ||
        path == Path::kRows) {
      q = packed.narrow(3, 0, r).reshape({s, b, g * r, d});
      k = packed.select(3, r);
      v = packed.select(3, r + 1);
    } else {
      const at::Tensor folded = packed.view({s, b * g, r + 2, d});
      q = folded.narrow(2, 0, r);
      k = folded.narrow(2, r, 1);
      v = folded.narrow(2, r + 1, 1);
    }
  }
  at::Tensor q, k, v;
};

void turn(const at::Tensor& packed, const RotaryAngles& rotary, double sign) {
  if (!rotary.cos.defined()) return;
  const int64_t heads = packed.size(3);
  rotate_(packed.view({packed.size(0), packed.size(1) * packed.size(2), heads, packed.size(4)})
              .narrow(2, 0, heads - 1),
          rotary.cos, rotary.sin, rotary.interleaved, sign);
}

class PackedAttentionFunction : public torch::autograd::Function<PackedAttentionFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& flat,
                            const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                            const PackedHeads& heads, const RotaryAngles& rotary,
                            const AttentionOptions& options) {
    auto saved = c10::make_intrusive<SavedOptions>();
    const int64_t s = flat.size(0), b = flat.size(1);
    const at::Tensor packed =
        flat.view({s, b, heads.groups, heads.heads_per_group + 2, heads.head_size});
    turn(packed, rotary, 1.0);
    const QKV folded(packed, Path::kFlashCuda);
    saved->options = options;
    saved->path = choose_path(folded.q, folded.k, folded.v, options);
    const QKV qkv(packed, saved->path);
    saved->backward = backward_path(saved->path, qkv.q, qkv.k, qkv.v, options);
    check_attention(qkv.q, qkv.k, qkv.v, saved->options);
    Forward f = run_forward(saved->path, qkv.q, qkv.k, qkv.v, saved->options);
    torch::autograd::variable_list tensors = {packed, rotary.cos, rotary.sin};
    save(f, *saved, tensors);
    context->save_for_backward(tensors);
    context->saved_data["options"] = c10::IValue::make_capsule(saved);
    context->saved_data["interleaved"] = rotary.interleaved;
    return f.out.view({s, b, heads.groups * heads.heads_per_group * heads.head_size});
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto holder = c10::static_intrusive_pointer_cast<SavedOptions>(
        context->saved_data["options"].toCapsule());
    const auto t = context->get_saved_variables();
    const at::NoGradGuard no_grad;
    const at::Tensor& packed = t[0];
    const QKV qkv(packed, holder->path);
    at::Tensor dpacked = at::empty_like(packed);
    Grads result;
    if (writes_views(holder->backward)) {
      const QKV into(dpacked, holder->path);
      result = {into.q, into.k, into.v};
    }
    const at::Tensor dout = grads[0].contiguous().view(qkv.q.sizes());
    const Forward f = saved_forward(t, 3, *holder, qkv.q, qkv.k, qkv.v);
    const at::Tensor dbias = zero_bias_grad(holder->options);
    run_backward(holder->backward, dout, qkv.q, qkv.k, qkv.v, f, holder->options, result, dbias);
    if (!writes_views(holder->backward)) {
      const int64_t r = packed.size(3) - 2;
      const at::Tensor dq = dpacked.narrow(3, 0, r), dk = dpacked.select(3, r),
                       dv = dpacked.select(3, r + 1);
      dq.copy_(std::get<0>(result).reshape(dq.sizes()));
      dk.copy_(std::get<1>(result).reshape(dk.sizes()));
      dv.copy_(std::get<2>(result).reshape(dv.sizes()));
    }
    turn(dpacked, {t[1], t[2], context->saved_data["interleaved"].toBool()}, -1.0);
    return {dpacked.view({packed.size(0), packed.size(1), -1}),
            sinks_grad(dout, f, holder->options),
            dbias,
            {},
            {},
            {}};
  }
};

}  // namespace

AttentionParts attention_parts(int64_t b, int64_t heads, int64_t groups, int64_t s, int64_t s_k,
                               bool deterministic) {
  if (!deterministic) return {b, heads, 0};
  constexpr int64_t kOfSamples = int64_t{1} << 30, kOfOneSample = int64_t{4} << 30;
  const int64_t of_head = (s + 63) / 64 * 64 * ((s_k + 127) / 128 * 128) * 2;
  const int64_t samples = std::clamp<int64_t>(kOfSamples / (heads * of_head), 1, b);
  const int64_t together =
      groups == 1 ? std::clamp<int64_t>(kOfOneSample / of_head, 1, heads) : heads;
  return {samples, together, samples * together * of_head};
}

at::Tensor core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options) {
  check_attention(q, k, v, options);
  return AttentionFunction::apply(q, k, v, std::optional<at::Tensor>(options.sinks),
                                  std::optional<at::Tensor>(options.distance_bias), options);
}

at::Tensor packed_attention(const at::Tensor& packed, const PackedHeads& heads,
                            const RotaryAngles& rotary, const AttentionOptions& options) {
  check_shape("packed attention", packed,
              {-1, -1, heads.groups * (heads.heads_per_group + 2) * heads.head_size});
  MEGATRON_ASSERT(packed.is_contiguous(), "packed attention over a tensor with gaps");
  return PackedAttentionFunction::apply(packed, std::optional<at::Tensor>(options.sinks),
                                        std::optional<at::Tensor>(options.distance_bias), heads,
                                        rotary, options);
}

}  // namespace megatron
