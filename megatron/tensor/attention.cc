#include "megatron/tensor/attention.h"

#include "megatron/base/check.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/detail/attention_unfused.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

enum class Path { kFlashCpu, kFlashCuda, kCudnn, kUnfused };

// What a library kernel needs to differentiate its output; empty for the unfused path.
struct Forward {
  at::Tensor out;  // [s, b, n, d]
  at::Tensor library_out, lse, seed, offset, cu_q, cu_k;
};

bool library_causal(const at::Tensor& q, const AttentionOptions& o) { return o.causal && q.size(0) > 1; }

Path choose_path(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionOptions& o) {
  if (o.backend == AttentionBackend::kUnfused || o.backend == AttentionBackend::kLocal) return Path::kUnfused;
  std::string reason = why_unfused(q, k, v, o);
  if (o.backend == AttentionBackend::kFused && reason.empty()) {
    if (!q.is_cuda()) reason = "it needs a CUDA device";
    if (q.size(3) > 128) reason = "the head size is above 128";
  }
  if (reason.empty()) {
    if (!q.is_cuda()) return Path::kFlashCpu;
    return o.backend == AttentionBackend::kFused ? Path::kCudnn : Path::kFlashCuda;
  }
  MEGATRON_CHECK(o.backend == AttentionBackend::kAuto, "--attention-backend ",
                 o.backend == AttentionBackend::kFlash ? "flash" : "fused", " cannot compute this attention: ",
                 reason, "\nhint: --attention-backend auto falls back to unfused attention");
  return Path::kUnfused;
}

// Each key group repeated for its query heads, [s_k, b, n, d]; the CPU kernel knows no groups.
at::Tensor repeat_groups(const at::Tensor& t, int64_t heads) {
  if (t.size(2) == heads) return t;
  const int64_t r = heads / t.size(2);
  return t.unsqueeze(3).expand({-1, -1, -1, r, -1}).reshape({t.size(0), t.size(1), heads, t.size(3)});
}

at::Tensor sum_groups(const at::Tensor& grad, int64_t groups) {
  if (grad.size(2) == groups) return grad;
  return grad.reshape({grad.size(0), grad.size(1), groups, grad.size(2) / groups, grad.size(3)}).sum(3);
}

// Additive mask of the CPU kernel when its own causal mask does not fit.
std::optional<at::Tensor> cpu_mask(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& o) {
  if (library_mask_fits(q, k, o)) return std::nullopt;
  const at::Tensor mask = attention_mask(q, k, o);
  return at::zeros(mask.sizes(), q.options()).masked_fill_(mask, -std::numeric_limits<double>::infinity());
}

Forward run_forward(Path path, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const AttentionOptions& o) {
  const at::NoGradGuard no_grad;
  Forward f;
  const bool causal = library_causal(q, o);
  switch (path) {
    case Path::kUnfused:
      f.out = unfused_attention(q, k, v, o);
      return f;
    case Path::kFlashCpu: {
      const int64_t heads = q.size(2);
      const auto mask = cpu_mask(q, k, o);
      std::tie(f.library_out, f.lse) = at::_scaled_dot_product_flash_attention_for_cpu(
          to_heads(q), to_heads(repeat_groups(k, heads)), to_heads(repeat_groups(v, heads)), 0.0,
          causal && !mask.has_value(), mask, o.scale);
      break;
    }
    case Path::kFlashCuda: {
      auto r = at::_scaled_dot_product_flash_attention(to_heads(q), to_heads(k), to_heads(v), 0.0, causal, false,
                                                       o.scale);
      f.library_out = std::get<0>(r);
      f.lse = std::get<1>(r);
      f.cu_q = std::get<2>(r);
      f.cu_k = std::get<3>(r);
      f.seed = std::get<6>(r);
      f.offset = std::get<7>(r);
      break;
    }
    case Path::kCudnn: {
      auto r = at::_scaled_dot_product_cudnn_attention(to_heads(q), to_heads(k), to_heads(v), std::nullopt, true,
                                                       0.0, causal, false, o.scale);
      f.library_out = std::get<0>(r);
      f.lse = std::get<1>(r);
      f.cu_q = std::get<2>(r);
      f.cu_k = std::get<3>(r);
      f.seed = std::get<6>(r);
      f.offset = std::get<7>(r);
      break;
    }
  }
  f.out = from_heads(f.library_out).contiguous();
  return f;
}

using Grads = AttentionGrads;

Grads run_backward(Path path, const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, const Forward& f, const AttentionOptions& o) {
  if (path == Path::kUnfused) return unfused_attention_backward(dout, q, k, v, o);
  const bool causal = library_causal(q, o);
  Grads grads;
  if (path == Path::kFlashCpu) {
    const int64_t heads = q.size(2), groups = k.size(2);
    const auto mask = cpu_mask(q, k, o);
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        to_heads(dout), to_heads(q), to_heads(repeat_groups(k, heads)), to_heads(repeat_groups(v, heads)),
        f.library_out, f.lse, 0.0, causal && !mask.has_value(), mask, o.scale);
    return {from_heads(dq), sum_groups(from_heads(dk), groups), sum_groups(from_heads(dv), groups)};
  }
  if (path == Path::kFlashCuda) {
    const DeterministicScope deterministic;
    grads = at::_scaled_dot_product_flash_attention_backward(
        to_heads(dout), to_heads(q), to_heads(k), to_heads(v), f.library_out, f.lse, f.cu_q, f.cu_k, q.size(0),
        k.size(0), 0.0, causal, f.seed, f.offset, o.scale);
  } else {
    grads = at::_scaled_dot_product_cudnn_attention_backward(
        to_heads(dout), to_heads(q), to_heads(k), to_heads(v), f.library_out, f.lse, f.seed, f.offset,
        at::Tensor(), f.cu_q, f.cu_k, q.size(0), k.size(0), 0.0, causal, o.scale);
  }
  return {from_heads(std::get<0>(grads)), from_heads(std::get<1>(grads)), from_heads(std::get<2>(grads))};
}

// Carries the options through autograd's context.
struct SavedOptions : torch::CustomClassHolder {
  AttentionOptions options;
  Path path = Path::kUnfused;
};

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionOptions& options) {
    auto saved = c10::make_intrusive<SavedOptions>();
    saved->options = options;
    saved->path = choose_path(q, k, v, options);
    Forward f = run_forward(saved->path, q, k, v, options);
    torch::autograd::variable_list tensors = {q, k, v};
    if (saved->path != Path::kUnfused && !options.recompute) {
      tensors.insert(tensors.end(), {f.library_out, f.lse, f.seed, f.offset, f.cu_q, f.cu_k});
    }
    context->save_for_backward(tensors);
    context->saved_data["options"] = c10::IValue::make_capsule(saved);
    return f.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto holder = c10::static_intrusive_pointer_cast<SavedOptions>(context->saved_data["options"].toCapsule());
    const auto t = context->get_saved_variables();
    const at::NoGradGuard no_grad;
    Forward f;
    if (t.size() > 3) {
      f.library_out = t[3];
      f.lse = t[4];
      f.seed = t[5];
      f.offset = t[6];
      f.cu_q = t[7];
      f.cu_k = t[8];
    } else if (holder->path != Path::kUnfused) {
      f = run_forward(holder->path, t[0], t[1], t[2], holder->options);
    }
    auto [dq, dk, dv] = run_backward(holder->path, grads[0], t[0], t[1], t[2], f, holder->options);
    return {dq, dk, dv, {}};
  }
};

}  // namespace

at::Tensor core_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options) {
  check_attention(q, k, v, options);
  return AttentionFunction::apply(q, k, v, options);
}

}  // namespace megatron
