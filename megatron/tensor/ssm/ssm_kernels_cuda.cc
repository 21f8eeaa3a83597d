#include "megatron/kernels/ssm/conv_silu.h"
#include "megatron/kernels/ssm/gated_delta.h"
#include "megatron/kernels/ssm/gated_delta_backward.h"
#include "megatron/kernels/ssm/gated_norm.h"
#include "megatron/kernels/ssm/ssd_scan.h"
#include "megatron/kernels/ssm/ssd_scan_backward.h"
#include "megatron/kernels/ssm/ssd_step.h"
#include "megatron/kernels/ssm/unit_length.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"

namespace megatron::ssm_kernels {

namespace {

// [tokens, samples, ...] in bf16 on a GPU, what a token holds contiguous, 16-byte aligned.
bool has_rows(const at::Tensor& t) {
  if (!t.is_cuda() || t.scalar_type() != at::kBFloat16 || t.numel() == 0) return false;
  int64_t inner = 1;
  for (int64_t i = t.dim() - 1; i >= 2; --i) {
    if (t.size(i) > 1 && t.stride(i) != inner) return false;
    inner *= t.size(i);
  }
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && inner % 8 == 0 &&
         (t.size(0) == 1 || t.stride(0) % 8 == 0) && (t.size(1) == 1 || t.stride(1) % 8 == 0);
}
ScanRows rows(const at::Tensor& t) {
  const int64_t least = t.numel() / (t.size(0) * t.size(1));
  return {t.data_ptr(), t.size(0) == 1 ? least * t.size(1) : t.stride(0),
          t.size(1) == 1 ? least : t.stride(1)};
}
at::Tensor empty_bytes(int64_t count, const at::Tensor& like) {
  return at::empty({count}, like.options().dtype(at::kByte));
}
ScanDocuments documents(const at::Tensor& runs) {
  if (!runs.defined()) return {};
  return {runs.const_data_ptr<int64_t>(), runs.stride(0), runs.stride(1)};
}
const float* floats(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<float>() : nullptr;
}
at::Tensor empty_floats(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}
// A place for a gradient of `like`: the one that is given, if a kernel can write it.
at::Tensor place(const at::Tensor& given, const at::Tensor& like) {
  return given.defined() && has_rows(given) ? given : at::empty(like.sizes(), like.options());
}
at::Tensor float_place(const at::Tensor& given, const at::Tensor& like) {
  const bool fits = given.defined() && given.scalar_type() == at::kFloat && given.is_contiguous();
  return fits ? given : empty_floats(like.sizes(), like);
}
// Contiguous bf16 parameters, aligned.
bool is_parameter(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 && t.is_contiguous() &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// ---- convolution

bool fits_conv(const ConvOperands& o) {
  return has_rows(o.u) && is_parameter(o.weight) && (!o.bias.defined() || is_parameter(o.bias)) &&
         conv_silu_supports(o.u.size(2), o.weight.size(2)) &&
         (!o.before.defined() || has_rows(o.before));
}
// What the tensors of the borders hold must live until the kernel is launched.
ConvSiluArgs conv_args(const ConvOperands& o, at::Tensor& runs_before) {
  ConvSiluArgs args;
  args.tokens = o.u.size(0);
  args.samples = o.u.size(1);
  args.channels = o.u.size(2);
  args.width = o.weight.size(2);
  args.u = rows(o.u);
  args.weight = o.weight.const_data_ptr();
  args.bias = o.bias.defined() ? o.bias.const_data_ptr() : nullptr;
  if (o.before.defined()) args.before = rows(o.before);
  args.documents = documents(o.runs);
  if (o.runs.defined() && o.runs_before.defined()) {
    runs_before =
        at::empty_strided(o.runs_before.sizes(), o.runs.strides(), o.runs_before.options());
    runs_before.copy_(o.runs_before);
    args.documents_before = runs_before.const_data_ptr<int64_t>();
  }
  return args;
}

// ---- norm

bool fits_norm(const NormOperands& o, int64_t groups) {
  return has_rows(o.y) && has_rows(o.z) && is_parameter(o.w) &&
         gated_norm_supports(o.y.size(2) / groups);
}
GatedNormArgs norm_args(const NormOperands& o, int64_t groups, double epsilon) {
  GatedNormArgs args;
  args.tokens = o.y.size(0);
  args.samples = o.y.size(1);
  args.groups = groups;
  args.group_size = o.y.size(2) / groups;
  args.epsilon = static_cast<float>(epsilon);
  args.y = rows(o.y);
  args.z = rows(o.z);
  args.weight = o.w.const_data_ptr();
  return args;
}
// Of [s, b, H, V] with one weight for all heads.
GatedNormArgs gate_args(const NormOperands& o, double epsilon) {
  GatedNormArgs args = norm_args({o.y.flatten(2), o.z.flatten(2), o.w}, o.y.size(2), epsilon);
  args.norm_first = args.shared_weight = true;
  return args;
}
bool fits_gate(const NormOperands& o) {
  return has_rows(o.y) && has_rows(o.z) && is_parameter(o.w) && gated_norm_supports(o.y.size(3));
}

NormResult norm_forward(const NormOperands& o, GatedNormArgs args, at::IntArrayRef rstd) {
  const NormResult result{at::empty(o.y.sizes(), o.y.options()), empty_floats(rstd, o.y)};
  args.out = rows(result.o);
  args.rstd = result.rstd.data_ptr<float>();
  gated_norm_forward_cuda(args, current_stream(o.y));
  return result;
}
at::Tensor norm_apply(const NormOperands& o, GatedNormArgs args, const at::Tensor& rstd) {
  const at::Tensor given = rstd.contiguous(), out = at::empty(o.y.sizes(), o.y.options());
  args.out = rows(out);
  args.given_rstd = floats(given);
  gated_norm_forward_cuda(args, current_stream(o.y));
  return out;
}
NormGrads norm_backward(const at::Tensor& grad, const NormOperands& o, GatedNormArgs args,
                        const at::Tensor& dz) {
  const NormGrads grads{at::empty(o.y.sizes(), o.y.options()), place(dz, o.z),
                        empty_floats(o.w.sizes(), o.y)};
  args.dout = rows(grad);
  args.dy = rows(grads.y);
  args.dz = rows(grads.z);
  args.dweight = grads.w.data_ptr<float>();
  const at::Tensor workspace = empty_floats({gated_norm_workspace(args)}, o.y);
  args.workspace = workspace.data_ptr<float>();
  gated_norm_backward_cuda(args, current_stream(o.y));
  return grads;
}

// ---- scan

bool fits_scan(const ScanTensors& o) {
  return has_rows(o.x) && has_rows(o.B) && has_rows(o.C) && o.dt.scalar_type() == at::kFloat &&
         o.A.scalar_type() == at::kFloat && o.D.scalar_type() == at::kFloat &&
         ssd_scan_supports(o.x.size(3), o.B.size(3)) && has_ssd_scan() &&
         (!o.state.defined() || o.state.scalar_type() == at::kFloat);
}
// The operands, with what the kernels need contiguous.
struct HeldScan {
  at::Tensor dt, a, d, initial_state, initial_run;
  SsdScanArgs args;

  explicit HeldScan(const ScanTensors& o)
      : dt(o.dt.contiguous()), a(o.A.contiguous()), d(o.D.contiguous()) {
    args.tokens = o.x.size(0);
    args.samples = o.x.size(1);
    args.heads = o.x.size(2);
    args.head_size = o.x.size(3);
    args.groups = o.B.size(2);
    args.state_size = o.B.size(3);
    args.x = rows(o.x);
    args.b = rows(o.B);
    args.c = rows(o.C);
    args.dt = floats(dt);
    args.a = floats(a);
    args.d = floats(d);
    args.documents = documents(o.runs);
    if (o.state.defined()) {
      initial_state = o.state.contiguous();
      args.initial_state = floats(initial_state);
    }
    if (o.runs.defined() && o.run.defined()) {
      initial_run = o.run.contiguous();
      args.initial_document = initial_run.const_data_ptr<int64_t>();
    }
  }
};
at::Tensor empty_state(const ScanTensors& o) {
  return empty_floats({o.x.size(1), o.x.size(2), o.x.size(3), o.B.size(3)}, o.x);
}

}  // namespace

std::optional<at::Tensor> causal_conv(const ConvOperands& o) {
  if (!fits_conv(o)) return std::nullopt;
  at::Tensor runs_before;
  ConvSiluArgs args = conv_args(o, runs_before);
  const at::Tensor y = at::empty(o.u.sizes(), o.u.options());
  args.y = rows(y);
  conv_silu_forward_cuda(args, current_stream(o.u));
  return y;
}

std::optional<ConvGrads> causal_conv_backward(const at::Tensor& dy, const ConvOperands& o,
                                              const at::Tensor& du) {
  if (!fits_conv(o) || !has_rows(dy)) return std::nullopt;
  at::Tensor runs_before;
  ConvSiluArgs args = conv_args(o, runs_before);
  ConvGrads grads;
  grads.u = place(du, o.u);
  grads.weight = empty_floats(o.weight.sizes(), o.u);
  args.dy = rows(dy);
  args.du = rows(grads.u);
  args.dweight = grads.weight.data_ptr<float>();
  if (o.bias.defined()) {
    grads.bias = empty_floats(o.bias.sizes(), o.u);
    args.dbias = grads.bias.data_ptr<float>();
  }
  if (o.before.defined()) {
    grads.before = at::empty(o.before.sizes(), o.u.options());
    args.dbefore = rows(grads.before);
  }
  const at::Tensor workspace = empty_floats({conv_silu_workspace(args)}, o.u);
  args.workspace = workspace.data_ptr<float>();
  conv_silu_backward_cuda(args, current_stream(o.u));
  return grads;
}

std::optional<NormResult> gated_norm(const NormOperands& o, int64_t groups, double eps) {
  if (!fits_norm(o, groups)) return std::nullopt;
  return norm_forward(o, norm_args(o, groups, eps), {o.y.size(0), o.y.size(1), groups});
}

std::optional<at::Tensor> gated_norm_apply(const NormOperands& o, const at::Tensor& rstd) {
  if (!fits_norm(o, rstd.size(2))) return std::nullopt;
  return norm_apply(o, norm_args(o, rstd.size(2), 0.0), rstd);
}

std::optional<NormGrads> gated_norm_backward(const at::Tensor& grad, const NormOperands& o,
                                             int64_t groups, double eps, const at::Tensor& dz) {
  if (!fits_norm(o, groups) || !has_rows(grad)) return std::nullopt;
  return norm_backward(grad, o, norm_args(o, groups, eps), dz);
}

std::optional<NormResult> normed_gate(const NormOperands& o, double eps) {
  if (!fits_gate(o)) return std::nullopt;
  return norm_forward(o, gate_args(o, eps), o.y.sizes().slice(0, 3));
}

std::optional<at::Tensor> normed_gate_apply(const NormOperands& o, const at::Tensor& rstd) {
  if (!fits_gate(o)) return std::nullopt;
  return norm_apply(o, gate_args(o, 0.0), rstd);
}

std::optional<NormGrads> normed_gate_backward(const at::Tensor& grad, const NormOperands& o,
                                              const at::Tensor& rstd, const at::Tensor& dz) {
  if (!fits_gate(o) || !has_rows(grad)) return std::nullopt;
  GatedNormArgs args = gate_args(o, 0.0);
  const at::Tensor given = rstd.contiguous();
  args.given_rstd = floats(given);
  return norm_backward(grad, o, args, dz);
}

bool has_scans() { return has_ssd_scan(); }

std::optional<ScanOutputs> ssd_scan(const ScanTensors& o) {
  if (!fits_scan(o)) return std::nullopt;
  HeldScan scan(o);
  const ScanOutputs result{at::empty(o.x.sizes(), o.x.options()), empty_state(o)};
  scan.args.y = rows(result.y);
  scan.args.final_state = result.state.data_ptr<float>();
  ssd_scan_forward_cuda(scan.args, current_stream(o.x));
  return result;
}

std::optional<ScanOutputs> ssd_step(const ScanTensors& o) {
  if (o.x.size(0) != 1 || o.runs.defined() || !o.state.defined() ||
      o.state.scalar_type() != at::kFloat || !o.state.is_contiguous() ||
      o.dt.scalar_type() != at::kFloat || o.dt.stride(2) != 1 || o.A.scalar_type() != at::kFloat ||
      o.D.scalar_type() != at::kFloat || !has_rows(o.x) || !has_rows(o.B) || !has_rows(o.C) ||
      !ssd_step_supports(o.x.size(3), o.B.size(3)))
    return std::nullopt;
  const at::Tensor a = o.A.contiguous(), d = o.D.contiguous();
  const ScanOutputs result{at::empty(o.x.sizes(), o.x.options()), empty_state(o)};
  SsdStepArgs args;
  args.rows = o.x.size(1);
  args.heads = o.x.size(2);
  args.groups = o.B.size(2);
  args.head_size = o.x.size(3);
  args.state_size = o.B.size(3);
  args.x = o.x.const_data_ptr(), args.x_row = rows(o.x).sample;
  args.b = o.B.const_data_ptr(), args.b_row = rows(o.B).sample;
  args.c = o.C.const_data_ptr(), args.c_row = rows(o.C).sample;
  args.dt = floats(o.dt), args.dt_row = o.dt.stride(1);
  args.y = result.y.data_ptr(), args.y_row = rows(result.y).sample;
  args.a = floats(a), args.d = floats(d);
  args.states = o.state.const_data_ptr();
  args.next_states = result.state.data_ptr();
  ssd_step_cuda(args, current_stream(o.x));
  return result;
}

std::optional<ScanGradients> ssd_scan_backward(const at::Tensor& dy, const at::Tensor& dstate,
                                               const ScanTensors& o, const ScanGradients& places) {
  if (!fits_scan(o) || !has_rows(dy) || !ssd_scan_backward_supports(o.x.size(3), o.B.size(3)))
    return std::nullopt;
  const HeldScan scan(o);
  const at::Tensor dfinal = dstate.defined() ? dstate.contiguous() : dstate;
  ScanGradients grads;
  grads.x = place(places.x, o.x);
  grads.B = place(places.B, o.B);
  grads.C = place(places.C, o.C);
  grads.dt = float_place(places.dt, o.dt);
  grads.A = empty_floats(o.A.sizes(), o.x);
  grads.D = empty_floats(o.D.sizes(), o.x);
  grads.state = empty_state(o);
  SsdScanBackwardArgs args;
  args.scan = scan.args;
  args.dy = rows(dy);
  args.dfinal_state = floats(dfinal);
  args.dx = rows(grads.x);
  args.db = rows(grads.B);
  args.dc = rows(grads.C);
  args.ddt = grads.dt.data_ptr<float>();
  args.da = grads.A.data_ptr<float>();
  args.dd = grads.D.data_ptr<float>();
  args.dinitial_state = grads.state.data_ptr<float>();
  const at::Tensor workspace = empty_bytes(ssd_scan_workspace(args), o.x);
  args.workspace = workspace.data_ptr();
  ssd_scan_backward_cuda(args, current_stream(o.x));
  return grads;
}

// ---- the gated delta rule

namespace {

bool fits_unit_length(const at::Tensor& x) {
  return has_rows(x) && x.dim() == 4 && unit_length_supports(x.size(3)) && has_scans();
}
UnitLengthArgs unit_length_args(const at::Tensor& x) {
  UnitLengthArgs args;
  args.tokens = x.size(0);
  args.samples = x.size(1);
  args.heads = x.size(2);
  args.size = x.size(3);
  args.x = rows(x);
  return args;
}

bool fits_delta(const DeltaTensors& o) {
  return has_rows(o.q) && has_rows(o.k) && has_rows(o.v) && o.g.scalar_type() == at::kFloat &&
         o.beta.scalar_type() == at::kFloat && gated_delta_supports(o.k.size(3), o.v.size(3)) &&
         has_scans() && (!o.state.defined() || o.state.scalar_type() == at::kFloat);
}
// The operands, with what the kernels need contiguous.
struct HeldDelta {
  at::Tensor g, beta, initial_state, initial_run;
  GatedDeltaArgs args;

  explicit HeldDelta(const DeltaTensors& o) : g(o.g.contiguous()), beta(o.beta.contiguous()) {
    args.tokens = o.v.size(0);
    args.samples = o.v.size(1);
    args.key_heads = o.k.size(2);
    args.value_heads = o.v.size(2);
    args.key_size = o.k.size(3);
    args.value_size = o.v.size(3);
    args.q = rows(o.q);
    args.k = rows(o.k);
    args.v = rows(o.v);
    args.g = floats(g);
    args.beta = floats(beta);
    args.documents = documents(o.runs);
    if (o.state.defined()) {
      initial_state = o.state.contiguous();
      args.initial_state = floats(initial_state);
    }
    if (o.runs.defined() && o.run.defined()) {
      initial_run = o.run.contiguous();
      args.initial_document = initial_run.const_data_ptr<int64_t>();
    }
  }
};
at::Tensor empty_state(const DeltaTensors& o) {
  return empty_floats({o.v.size(1), o.v.size(2), o.k.size(3), o.v.size(3)}, o.v);
}

}  // namespace

std::optional<at::Tensor> unit_length(const at::Tensor& x) {
  if (!fits_unit_length(x)) return std::nullopt;
  UnitLengthArgs args = unit_length_args(x);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  args.y = rows(y);
  unit_length_forward_cuda(args, current_stream(x));
  return y;
}

std::optional<at::Tensor> unit_length_backward(const at::Tensor& grad, const at::Tensor& x,
                                               const at::Tensor& dx) {
  if (!fits_unit_length(x) || !has_rows(grad)) return std::nullopt;
  UnitLengthArgs args = unit_length_args(x);
  const at::Tensor result = place(dx, x);
  args.dy = rows(grad);
  args.dx = rows(result);
  unit_length_backward_cuda(args, current_stream(x));
  return result;
}

std::optional<DeltaOutputs> delta_rule(const DeltaTensors& o) {
  if (!fits_delta(o)) return std::nullopt;
  HeldDelta rule(o);
  const DeltaOutputs result{at::empty(o.v.sizes(), o.v.options()), empty_state(o)};
  rule.args.o = rows(result.o);
  rule.args.final_state = result.state.data_ptr<float>();
  const at::Tensor workspace = empty_bytes(gated_delta_workspace(rule.args), o.v);
  rule.args.workspace = workspace.data_ptr();
  gated_delta_forward_cuda(rule.args, current_stream(o.v));
  return result;
}

std::optional<DeltaGradients> delta_rule_backward(const at::Tensor& grad, const at::Tensor& dstate,
                                                  const DeltaTensors& o,
                                                  const DeltaGradients& places) {
  if (!fits_delta(o) || !has_rows(grad) || !gated_delta_backward_supports(o.k.size(3), o.v.size(3)))
    return std::nullopt;
  const HeldDelta rule(o);
  const at::Tensor dfinal = dstate.defined() ? dstate.contiguous() : dstate;
  DeltaGradients grads;
  grads.q = at::empty(o.q.sizes(), o.q.options());
  grads.k = at::empty(o.k.sizes(), o.k.options());
  grads.v = place(places.v, o.v);
  grads.g = float_place(places.g, o.g);
  grads.beta = float_place(places.beta, o.beta);
  grads.state = empty_state(o);
  GatedDeltaBackwardArgs args;
  args.rule = rule.args;
  args.dout = rows(grad);
  args.dfinal_state = floats(dfinal);
  args.dq = rows(grads.q);
  args.dk = rows(grads.k);
  args.dv = rows(grads.v);
  args.dg = grads.g.data_ptr<float>();
  args.dbeta = grads.beta.data_ptr<float>();
  args.dinitial_state = grads.state.data_ptr<float>();
  const at::Tensor workspace = empty_bytes(gated_delta_backward_workspace(rule.args), o.v);
  args.workspace = workspace.data_ptr();
  gated_delta_backward_cuda(args, current_stream(o.v));
  return grads;
}

}  // namespace megatron::ssm_kernels
