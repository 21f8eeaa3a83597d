#include "megatron/transformer/ssm/mamba_core.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/letters.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Initial values: heads whose time steps begin between 1/1000 and 1/10, and forget at rates of 1 to
// 16 for each unit of time.
at::Tensor initial_dt_bias(const at::Tensor& log_dt) {
  const at::Tensor dt = at::exp(log_dt).clamp_min(1e-4);
  return dt + at::log(-at::expm1(-dt));
}

at::Tensor initial_A_log(const at::Tensor& rate) { return at::log(rate); }

}  // namespace

MambaShape::MambaShape(const TransformerConfig& c, int64_t t)
    : heads(c.mamba_heads(c) / t),
      head_size(c.mamba_head_dim),
      groups(std::max<int64_t>(1, c.mamba_num_groups / t)),
      state(c.mamba_state_dim),
      sharing(std::max<int64_t>(1, t / c.mamba_num_groups)) {
  Violations violations;
  kMambaLetter.validate(c, violations);
  kMambaLetter.validate_ranks(c, t, violations);
  violations.throw_if_any();
}

MambaParameters::MambaParameters(const TransformerConfig& c, int64_t t) {
  const int64_t width = c.mamba_width(c), states = c.mamba_states(), heads = c.mamba_heads(c),
                channels = width + 2 * states;
  const double bound = 1.0 / std::sqrt(static_cast<double>(kMambaConvWidth));
  divide_over_heads(conv_weight, t, {channels, 1, kMambaConvWidth}, {width, states, states});
  divide_over_heads(conv_bias, t, {channels}, {width, states, states});
  for (Parameter* parameter : {&dt_bias, &A_log, &D}) {
    divide_over_heads(*parameter, t, {heads});
    parameter->keeps_fp32 = true;
  }
  divide_over_heads(norm, t, {width});
  conv_weight.init = conv_bias.init = Init::uniform(bound);
  dt_bias.init = Init::uniform_through(initial_dt_bias, std::log(1e-3), std::log(0.1));
  A_log.init = Init::uniform_through(initial_A_log, 1.0, 16.0);
  D.init = norm.init = Init::one();
  conv_bias.role = dt_bias.role = A_log.role = D.role = ParameterRole::kBias;
  norm.role = ParameterRole::kNorm;
}

// The parameters' values during one pass.
struct MambaCore::Values {
  explicit Values(MambaParameters& p)
      : held_{AcquiredValue(&p.conv_weight), AcquiredValue(&p.conv_bias), AcquiredValue(&p.dt_bias),
              AcquiredValue(&p.A_log),       AcquiredValue(&p.D),         AcquiredValue(&p.norm)},
        conv_weight(held_[0].value().view(p.conv_weight.local_shape)),
        conv_bias(held_[1].value().view({-1})),
        dt_bias(held_[2].value().view({-1})),
        A(-at::exp(wide(held_[3]))),
        D(wide(held_[4])),
        norm(held_[5].value().view({-1})) {}

 private:
  static at::Tensor wide(const AcquiredValue& held) {
    return held.value().view({-1}).to(accumulate_type(held.value()));
  }
  const AcquiredValue held_[6];

 public:
  const at::Tensor conv_weight, conv_bias, dt_bias, A, D, norm;
};

// Views of `mixed`, and what the scan reads.
struct MambaCore::Operands {
  Operands(const MambaShape& shape, const at::Tensor& mixed)
      : z(mixed.narrow(2, 0, shape.width())),
        u(mixed.narrow(2, shape.width(), shape.conv_channels())),
        r(mixed.narrow(2, shape.width() + shape.conv_channels(), shape.heads)) {}
  at::Tensor z, u, r;
};

namespace {

ScanOperands rows_of(const Segments::Segment& segment, const ScanOperands& whole) {
  return {segment.rows_of(whole.x),
          segment.rows_of(whole.dt),
          whole.A,
          segment.rows_of(whole.B),
          segment.rows_of(whole.C),
          whole.D,
          segment.runs};
}

// With decay [b, H] and a state [b, H, P, N] of each own segment, those of all segments.
struct StateMaps {
  StateMaps(const Segments& segments, const std::vector<at::Tensor>& own_decay,
            const std::vector<at::Tensor>& own_states) {
    std::vector<at::Tensor> packed;
    for (size_t i = 0; i < own_states.size(); ++i)
      packed.push_back(at::cat({own_decay[i].unsqueeze(-1), own_states[i].flatten(2)}, /*dim=*/2));
    for (const at::Tensor& map : segments.of_all(packed)) {
      decay.push_back(map.narrow(2, 0, 1).unsqueeze(-1));
      states.push_back(map.narrow(2, 1, map.size(2) - 1).view(own_states.front().sizes()));
    }
  }
  std::vector<at::Tensor> decay, states;
};

struct SavedMamba : torch::CustomClassHolder {
  SavedMamba(MambaCore* core, std::shared_ptr<const Segments> segments)
      : core(core), segments(std::move(segments)) {}
  MambaCore* core;
  std::shared_ptr<const Segments> segments;
};

}  // namespace

MambaCore::MambaCore(const TransformerConfig& config, const ParallelGroups& groups)
    : parameters(config, groups.tp.size()),
      groups_(groups),
      shape_(config, groups.tp.size()),
      limits_(config.time_step_limits()),
      chunk_(config.mamba_chunk_size),
      eps_(config.mamba_norm_epsilon),
      sharing_(groups.block({Axis::kTensor}, static_cast<int>(shape_.sharing), "mamba")) {}

NormGroups MambaCore::norm_groups() const { return {shape_.groups, &sharing_, eps_}; }

at::Tensor MambaCore::gather_groups(const at::Tensor& own) const {
  if (sharing_.size() == 1) return own;
  const int64_t s = own.size(0), b = own.size(1), n = shape_.states();
  const at::Tensor all = at::empty({shape_.sharing, s, b, 2, n}, own.options());
  sharing_.all_gather(all, own.contiguous())->wait();
  return all.permute({1, 2, 3, 0, 4}).reshape({s, b, 2 * shape_.sharing * n});
}

at::Tensor MambaCore::scatter_groups(const at::Tensor& grad) const {
  if (sharing_.size() == 1) return grad;
  const int64_t s = grad.size(0), b = grad.size(1), n = shape_.states();
  const at::Tensor all = grad.to(accumulate_type(grad))
                             .view({s, b, 2, shape_.sharing, n})
                             .permute({3, 0, 1, 2, 4})
                             .contiguous();
  const at::Tensor own = at::empty({s, b, 2 * n}, all.options());
  sharing_.reduce_scatter(own, all)->wait();
  return own.to(grad.scalar_type());
}

ScanOperands MambaCore::operands(const at::Tensor& x, const at::Tensor& bc, const at::Tensor& dt,
                                 const Values& values) const {
  const int64_t s = x.size(0), b = x.size(1), states = shape_.groups * shape_.state;
  const auto grouped = [&](int64_t first) {
    return bc.narrow(2, first, states).view({s, b, shape_.groups, shape_.state});
  };
  return {x.narrow(2, 0, shape_.width()).view({s, b, shape_.heads, shape_.head_size}),
          dt,
          values.A,
          grouped(0),
          grouped(states),
          values.D,
          {}};
}

struct MambaCore::Function : torch::autograd::Function<MambaCore::Function> {
  static variable_list forward(AutogradContext* context, const at::Tensor& mixed, const at::Tensor&,
                               MambaCore* core, const std::shared_ptr<const Segments>& segments,
                               LastChunk last) {
    const MambaShape& shape = core->shape_;
    const Values values(core->parameters);
    const Operands parts(shape, mixed);
    const std::vector<at::Tensor> before = segments->rows_before(parts.u);
    const at::Tensor convolved =
        conv_over_segments(*segments, parts.u, before, values.conv_weight, values.conv_bias);
    const at::Tensor bc =
        core->gather_groups(convolved.narrow(2, shape.width(), 2 * shape.states()));
    const ScanOperands whole =
        core->operands(convolved, bc, time_steps(parts.r, values.dt_bias, core->limits_), values);
    const std::vector<at::Tensor> incoming = core->incoming_states(*segments, whole);
    std::vector<at::Tensor> outputs;
    for (const Segments::Segment& segment : segments->own())
      outputs.push_back(ssd_scan(rows_of(segment, whole), {incoming[outputs.size()], segment.run},
                                 core->chunk_, last)
                            .y);
    const at::Tensor y = (outputs.size() == 1 ? outputs.front() : at::cat(outputs)).flatten(2);
    const GatedNormResult normed = gated_norm(y, parts.z, values.norm, core->norm_groups());
    variable_list saved = {mixed, y, normed.rstd, shape.sharing > 1 ? bc : at::Tensor()};
    saved.insert(saved.end(), before.begin(), before.end());
    saved.insert(saved.end(), incoming.begin(), incoming.end());
    context->save_for_backward(saved);
    context->saved_data["mamba"] =
        c10::IValue::make_capsule(c10::make_intrusive<SavedMamba>(core, segments));
    context->mark_non_differentiable({y, normed.rstd});
    return {normed.o, y, normed.rstd};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto held =
        c10::static_intrusive_pointer_cast<SavedMamba>(context->saved_data["mamba"].toCapsule());
    const Segments& segments = *held->segments;
    MambaCore& core = *held->core;
    const MambaShape& shape = core.shape_;
    const variable_list saved = context->get_saved_variables();
    const auto after = saved.begin() + 4, states = after + segments.own().size();
    const std::vector<at::Tensor> before(after, states), incoming(states, saved.end());
    const at::Tensor &mixed = saved[0], &y = saved[1];
    const Values values(core.parameters);
    const Operands parts(shape, mixed);
    const at::Tensor convolved =
        conv_over_segments(segments, parts.u, before, values.conv_weight, values.conv_bias);
    const at::Tensor bc =
        saved[3].defined() ? saved[3] : convolved.narrow(2, shape.width(), 2 * shape.states());
    const ScanOperands whole =
        core.operands(convolved, bc, time_steps(parts.r, values.dt_bias, core.limits_), values);

    const at::Tensor dmixed = at::empty_like(mixed);
    const Operands dparts(shape, dmixed);
    const GatedNormGrads norm = gated_norm_backward(grads[0], y, parts.z, values.norm, saved[2],
                                                    core.norm_groups(), dparts.z);
    const at::Tensor dy = norm.y.view(whole.x.sizes());
    const std::vector<at::Tensor> dstates = core.state_grads(segments, whole, dy);
    const at::Tensor dconvolved = at::empty_like(convolved),
                     own_dbc = dconvolved.narrow(2, shape.width(), 2 * shape.states()),
                     ddt = at::empty_like(whole.dt);
    const bool gathered = shape.sharing > 1;
    const at::Tensor dbc = gathered ? at::empty(bc.sizes(), bc.options()) : own_dbc;
    const ScanOperands dwhole = core.operands(dconvolved, dbc, ddt, values);
    at::Tensor dA, dD;
    size_t i = 0;
    for (const Segments::Segment& segment : segments.own()) {
      const ScanGrads scan =
          ssd_scan_backward(segment.rows_of(dy), dstates[i], rows_of(segment, whole),
                            {incoming[i], segment.run}, core.chunk_, rows_of(segment, dwhole));
      dA = i == 0 ? scan.A : dA + scan.A;
      dD = i == 0 ? scan.D : dD + scan.D;
      ++i;
    }
    if (gathered) own_dbc.copy_(core.scatter_groups(dbc));
    const TimeStepGrads steps = time_steps_backward(ddt, parts.r, values.dt_bias, core.limits_);
    dparts.r.copy_(steps.r);

    const ConvParameterGrads conv = conv_over_segments_backward(
        segments, dconvolved, parts.u, before, values.conv_weight, values.conv_bias, dparts.u);

    MambaParameters& p = core.parameters;
    add_gradient(p.conv_weight, conv.weight);
    add_gradient(p.conv_bias, conv.bias);
    add_gradient(p.dt_bias, steps.bias);
    add_gradient(p.A_log, dA * values.A);
    add_gradient(p.D, dD);
    add_gradient(p.norm, norm.w);
    return {dmixed, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::vector<at::Tensor> MambaCore::incoming_states(const Segments& segments,
                                                   const ScanOperands& whole) const {
  if (!segments.exchanges()) return {at::Tensor()};
  std::vector<at::Tensor> decay, added;
  for (const Segments::Segment& segment : segments.own()) {
    const ScanOperands own = rows_of(segment, whole);
    decay.push_back(ssd_decay(own, segment.run));
    added.push_back(ssd_state(own, segment.run, chunk_));
  }
  const StateMaps maps(segments, decay, added);
  return segments.own_of(states_before(maps.decay, maps.states));
}

std::vector<at::Tensor> MambaCore::state_grads(const Segments& segments, const ScanOperands& whole,
                                               const at::Tensor& dy) const {
  if (!segments.exchanges()) return {at::Tensor()};
  std::vector<at::Tensor> decay, own_grads;
  for (const Segments::Segment& segment : segments.own()) {
    const ScanOperands own = rows_of(segment, whole);
    decay.push_back(ssd_decay(own, segment.run));
    own_grads.push_back(ssd_state_grad(segment.rows_of(dy), own, segment.run, chunk_));
  }
  const StateMaps maps(segments, decay, own_grads);
  return segments.own_of(state_grads_after(maps.decay, maps.states));
}

MixerOutput MambaCore::forward(const at::Tensor& mixed, const ForwardContext& pass) {
  check_shape("input of a Mamba-2 mixer", mixed, {-1, -1, shape_.mixed()});
  MEGATRON_ASSERT(pass.unpadded == nullptr && !pass.attention_mask.defined(),
                  "a Mamba-2 layer takes document ids, no mask and no rows without padding");
  const variable_list out = Function::apply(
      mixed, anchor(), this, Segments::of_pass(pass, mixed.size(0), kMambaConvWidth, groups_.cp),
      last_chunk_of(pass));
  return {out[0], out[1], out[2]};
}

at::Tensor MambaCore::norm_again(const at::Tensor& mixed, const at::Tensor& y,
                                 const at::Tensor& rstd) {
  const Values values(parameters);
  return gated_norm_apply(y, Operands(shape_, mixed).z, values.norm, rstd);
}

at::Tensor MambaCore::decode(const at::Tensor& mixed, RecurrentState& state,
                             const RaggedBatch& batch) {
  const at::NoGradGuard no_grad;
  const int64_t t = mixed.size(0), back = kMambaConvWidth - 1;
  const Values values(parameters);
  const Operands parts(shape_, mixed);
  const at::ScalarType type = accumulate_type(mixed);
  const at::Tensor conv_rows = state.conv_rows(batch.num_slots, back, shape_.conv_channels(),
                                               mixed.options()),
                   states =
                       state.states(batch.num_slots, {shape_.heads, shape_.head_size, shape_.state},
                                    mixed.options().dtype(type));
  const at::Tensor convolved = at::empty({t, 1, shape_.conv_channels()}, mixed.options());
  const DecodingSteps steps(batch, mixed.device());
  steps.convolve(parts.u, values.conv_weight, values.conv_bias, conv_rows, convolved);
  const at::Tensor bc = gather_groups(convolved.narrow(2, shape_.width(), 2 * shape_.states()));
  const at::Tensor dt = time_steps(parts.r, values.dt_bias, limits_),
                   y = at::empty({t, 1, shape_.width()}, mixed.options());
  const auto rows_of = [&](int64_t first, int64_t count) -> RowOperands {
    return {at::cat({convolved.narrow(2, 0, shape_.width()).narrow(0, first, count),
                     bc.narrow(0, first, count)},
                    2),
            dt.narrow(0, first, count)};
  };
  const LastChunk last = state.replays_chunks() ? LastChunk::kFilled : LastChunk::kShort;
  const RowScan scan = [&](const RowOperands& own, const ScanState& initial) -> ScanOutput {
    const at::Tensor states_of_rows =
        own.rows.narrow(2, shape_.width(), own.rows.size(2) - shape_.width());
    const ScanResult result =
        ssd_scan(operands(own.rows, states_of_rows, own.steps, values), initial, chunk_, last);
    return {result.y.flatten(2), result.state};
  };
  const RowOperands open = state.open_rows(batch.num_slots, chunk_, rows_of(0, 1));
  if (state.replays_chunks()) {
    replay_chunks(batch, chunk_, rows_of(0, t), open, states, scan, y);
    return gated_norm(y, parts.z, values.norm, norm_groups()).o;
  }
  for (const DecodingSteps::Step& step : steps.all()) {
    if (step.has_drafts()) {
      scan_drafts(step, rows_of(step.first, step.count), open, states, scan,
                  y.narrow(0, step.first, step.count));
      continue;
    }
    const ScanOperands own =
        operands(step.rows_of(convolved), step.rows_of(bc), step.rows_of(dt), values);
    const ScanState initial{step.states_of(states, type)};
    const ScanResult result =
        step.count == 1 ? ssd_steps(own, initial) : ssd_scan(own, initial, chunk_);
    step.rows_of(y).copy_(result.y.flatten(2));
    step.keep(result.state, states);
  }
  return gated_norm(y, parts.z, values.norm, norm_groups()).o;
}

}  // namespace megatron
