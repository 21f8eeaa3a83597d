#include "megatron/transformer/ssm/gated_delta_core.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/nn/functional.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/ssm/normed_gate.h"
#include "megatron/transformer/ssm/uniform_math.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor initial_decay_rate(const at::Tensor& rate) { return at::log(rate); }

DeltaOperands segment_operands(const Segments::Segment& segment, const DeltaOperands& whole) {
  return {segment.rows_of(whole.q), segment.rows_of(whole.k),    segment.rows_of(whole.v),
          segment.rows_of(whole.g), segment.rows_of(whole.beta), segment.runs};
}

struct SavedGatedDelta : torch::CustomClassHolder {
  SavedGatedDelta(GatedDeltaCore* core, std::shared_ptr<const Segments> segments)
      : core(core), segments(std::move(segments)) {}
  GatedDeltaCore* core;
  std::shared_ptr<const Segments> segments;
};

// Of all segments in the order of the text: a matrix and a state of each.
struct DeltaMaps {
  DeltaMaps(const Segments& segments, const std::vector<at::Tensor>& own_decay,
            const std::vector<at::Tensor>& own_states) {
    const int64_t keys = own_decay.front().size(-1), values = own_states.front().size(-1);
    std::vector<at::Tensor> packed;
    for (size_t i = 0; i < own_states.size(); ++i)
      packed.push_back(at::cat({own_decay[i], own_states[i]}, /*dim=*/3));
    for (const at::Tensor& map : segments.of_all(packed)) {
      decay.push_back(map.narrow(3, 0, keys));
      states.push_back(map.narrow(3, keys, values));
    }
  }
  std::vector<at::Tensor> decay, states;
};

}  // namespace

GatedDeltaShape::GatedDeltaShape(const TransformerConfig& c, int64_t t)
    : key_heads(c.linear_num_key_heads / t),
      key_size(c.linear_key_head_dim),
      value_heads(c.linear_num_value_heads / t),
      value_size(c.linear_value_head_dim),
      conv_size(c.linear_conv_kernel_dim) {
  Violations violations;
  kGatedDeltaLetter.validate(c, violations);
  kGatedDeltaLetter.validate_ranks(c, t, violations);
  violations.throw_if_any();
}

GatedDeltaParameters::GatedDeltaParameters(const TransformerConfig& c, int64_t t) {
  const int64_t keys = c.linear_key_width(), values = c.linear_value_width(),
                heads = c.linear_num_value_heads, width = c.linear_conv_kernel_dim;
  divide_over_heads(conv_weight, t, {2 * keys + values, 1, width}, {keys, keys, values});
  conv_weight.init = Init::uniform(1.0 / std::sqrt(static_cast<double>(width)));
  for (Parameter* parameter : {&dt_bias, &A_log}) {
    divide_over_heads(*parameter, t, {heads});
    parameter->role = ParameterRole::kBias;
    parameter->keeps_fp32 = true;
  }
  dt_bias.init = Init::one();
  A_log.init = Init::uniform_through(initial_decay_rate, 1.0, 16.0);
  norm.local_shape = norm.global_shape = {c.linear_value_head_dim};
  norm.placement.partial_grad.insert(Axis::kTensor);
  norm.role = ParameterRole::kNorm;
  norm.init = Init::one();
}

// The parameters' values during one pass.
struct GatedDeltaCore::Values {
  explicit Values(GatedDeltaParameters& p)
      : held_{AcquiredValue(&p.conv_weight), AcquiredValue(&p.dt_bias), AcquiredValue(&p.A_log),
              AcquiredValue(&p.norm)},
        conv_weight(held_[0].value()),
        dt_bias(held_[1].value()),
        A(-at::exp(held_[2].value())),
        norm(held_[3].value()) {}

 private:
  const AcquiredValue held_[4];

 public:
  const at::Tensor conv_weight, dt_bias, A, norm;
};

// Views of `mixed`.
struct GatedDeltaCore::Rows {
  Rows(const GatedDeltaShape& shape, const at::Tensor& mixed)
      : u(mixed.narrow(2, 0, shape.conv_channels())),
        z(mixed.narrow(2, shape.conv_channels(), shape.value_width())),
        beta(mixed.narrow(2, shape.conv_channels() + shape.value_width(), shape.value_heads)),
        a(mixed.narrow(2, mixed.size(2) - shape.value_heads, shape.value_heads)) {}
  at::Tensor u, z, beta, a;
};

GatedDeltaCore::GatedDeltaCore(const TransformerConfig& config, const ParallelGroups& groups)
    : parameters(config, groups.tp.size()),
      groups_(groups),
      shape_(config, groups.tp.size()),
      chunk_(config.linear_chunk_size),
      eps_(config.layernorm_epsilon) {}

at::Tensor GatedDeltaCore::by_head(const at::Tensor& values) const {
  return values.unflatten(2, {shape_.value_heads, shape_.value_size});
}

DeltaOperands GatedDeltaCore::heads(const at::Tensor& convolved, const at::Tensor& g,
                                    const at::Tensor& beta) const {
  const int64_t keys = shape_.key_width();
  const auto keys_from = [&](int64_t first) {
    return convolved.narrow(2, first, keys).unflatten(2, {shape_.key_heads, shape_.key_size});
  };
  return {keys_from(0),
          keys_from(keys),
          by_head(convolved.narrow(2, 2 * keys, shape_.value_width())),
          g,
          beta,
          {}};
}

DeltaOperands GatedDeltaCore::operands(const at::Tensor& convolved, const Rows& rows,
                                       const Values& values) const {
  const at::ScalarType type = accumulate_type(rows.beta);
  DeltaOperands o = heads(convolved, values.A * time_steps(rows.a, values.dt_bias, {}),
                          uniform_sigmoid(rows.beta.to(type)));
  o.q = unit_length(o.q);
  o.k = unit_length(o.k);
  return o;
}

struct GatedDeltaCore::Function : torch::autograd::Function<GatedDeltaCore::Function> {
  static variable_list forward(AutogradContext* context, const at::Tensor& mixed, const at::Tensor&,
                               GatedDeltaCore* core,
                               const std::shared_ptr<const Segments>& segments, LastChunk last) {
    const Values values(core->parameters);
    const Rows rows(core->shape_, mixed);
    const std::vector<at::Tensor> before = segments->rows_before(rows.u);
    const DeltaOperands whole = core->operands(
        conv_over_segments(*segments, rows.u, before, values.conv_weight, {}), rows, values);
    const std::vector<at::Tensor> incoming = core->incoming_states(*segments, whole);
    std::vector<at::Tensor> outputs;
    for (const Segments::Segment& segment : segments->own())
      outputs.push_back(delta_rule(segment_operands(segment, whole),
                                   {incoming[outputs.size()], segment.run}, core->chunk_, last)
                            .o);
    const at::Tensor y = outputs.size() == 1 ? outputs.front() : at::cat(outputs);
    const NormedGateResult normed = normed_gate(y, core->by_head(rows.z), values.norm, core->eps_);
    variable_list saved = {mixed, y, normed.rstd};
    saved.insert(saved.end(), before.begin(), before.end());
    saved.insert(saved.end(), incoming.begin(), incoming.end());
    context->save_for_backward(saved);
    context->saved_data["gated delta net"] =
        c10::IValue::make_capsule(c10::make_intrusive<SavedGatedDelta>(core, segments));
    context->mark_non_differentiable({y, normed.rstd});
    return {normed.o.flatten(2), y, normed.rstd};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto held = c10::static_intrusive_pointer_cast<SavedGatedDelta>(
        context->saved_data["gated delta net"].toCapsule());
    const Segments& segments = *held->segments;
    GatedDeltaCore& core = *held->core;
    const variable_list saved = context->get_saved_variables();
    const auto after = saved.begin() + 3,
               states = after + static_cast<std::ptrdiff_t>(segments.own().size());
    const std::vector<at::Tensor> before(after, states), incoming(states, saved.end());
    const at::Tensor &mixed = saved[0], &y = saved[1];
    const Values values(core.parameters);
    const Rows rows(core.shape_, mixed);
    const at::Tensor convolved =
        conv_over_segments(segments, rows.u, before, values.conv_weight, {});
    const DeltaOperands whole = core.operands(convolved, rows, values);

    const at::Tensor dmixed = at::empty_like(mixed);
    const Rows drows(core.shape_, dmixed);
    const NormedGateGrads norm =
        normed_gate_backward(core.by_head(grads[0]), y, core.by_head(rows.z), values.norm, saved[2],
                             core.by_head(drows.z));

    const std::vector<at::Tensor> dstates = core.state_grads(segments, whole, norm.y);
    const at::Tensor dconvolved = at::empty_like(convolved), dg = at::empty_like(whole.g),
                     dbeta = at::empty_like(whole.beta);
    const DeltaOperands dwhole = core.heads(dconvolved, dg, dbeta),
                        raw = core.heads(convolved, whole.g, whole.beta);
    size_t i = 0;
    for (const Segments::Segment& segment : segments.own()) {
      const DeltaGrads rule = delta_rule_backward(
          segment.rows_of(norm.y), dstates[i], segment_operands(segment, whole),
          {incoming[i], segment.run}, core.chunk_, segment_operands(segment, dwhole));
      unit_length_backward(rule.q, segment.rows_of(raw.q), segment.rows_of(dwhole.q));
      unit_length_backward(rule.k, segment.rows_of(raw.k), segment.rows_of(dwhole.k));
      ++i;
    }
    drows.beta.copy_(dbeta * whole.beta * (1.0 - whole.beta));
    const TimeStepGrads steps = time_steps_backward(dg * values.A, rows.a, values.dt_bias, {});
    drows.a.copy_(steps.r);
    const ConvParameterGrads conv = conv_over_segments_backward(
        segments, dconvolved, rows.u, before, values.conv_weight, {}, drows.u);

    GatedDeltaParameters& p = core.parameters;
    add_gradient(p.conv_weight, conv.weight);
    add_gradient(p.dt_bias, steps.bias);
    add_gradient(p.A_log, (dg * whole.g).sum(at::IntArrayRef({0, 1})));
    add_gradient(p.norm, norm.w);
    return {dmixed, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

std::vector<at::Tensor> GatedDeltaCore::incoming_states(const Segments& segments,
                                                        const DeltaOperands& whole) const {
  if (!segments.exchanges()) return {at::Tensor()};
  std::vector<at::Tensor> decay, added;
  for (const Segments::Segment& segment : segments.own()) {
    DeltaSummary map = delta_summary(segment_operands(segment, whole), segment.run, chunk_);
    decay.push_back(std::move(map.decay));
    added.push_back(std::move(map.state));
  }
  const DeltaMaps maps(segments, decay, added);
  std::vector<at::Tensor> before = {at::zeros_like(maps.states.front())};
  for (size_t i = 0; i + 1 < maps.states.size(); ++i)
    before.push_back(at::matmul(maps.decay[i], before.back()) + maps.states[i]);
  return segments.own_of(before);
}

std::vector<at::Tensor> GatedDeltaCore::state_grads(const Segments& segments,
                                                    const DeltaOperands& whole,
                                                    const at::Tensor& dy) const {
  if (!segments.exchanges()) return {at::Tensor()};
  std::vector<at::Tensor> decay, own_grads;
  for (const Segments::Segment& segment : segments.own()) {
    const DeltaOperands own = segment_operands(segment, whole);
    decay.push_back(delta_summary(own, segment.run, chunk_).decay);
    own_grads.push_back(delta_state_grad(segment.rows_of(dy), own, segment.run, chunk_));
  }
  const DeltaMaps maps(segments, decay, own_grads);
  std::vector<at::Tensor> after(maps.states.size());
  at::Tensor grad = at::zeros_like(maps.states.front());
  for (size_t i = after.size(); i-- > 0;) {
    after[i] = grad;
    grad = at::matmul(maps.decay[i].mT(), grad) + maps.states[i];
  }
  return segments.own_of(after);
}

MixerOutput GatedDeltaCore::forward(const at::Tensor& mixed, const ForwardContext& pass) {
  check_shape("input of a gated delta net", mixed, {-1, -1, shape_.mixed()});
  MEGATRON_ASSERT(pass.unpadded == nullptr && !pass.attention_mask.defined(),
                  "a gated delta net takes document ids, no mask and no rows without padding");
  const variable_list out = Function::apply(
      mixed, anchor(), this, Segments::of_pass(pass, mixed.size(0), shape_.conv_size, groups_.cp),
      last_chunk_of(pass));
  return {out[0], out[1], out[2]};
}

at::Tensor GatedDeltaCore::norm_again(const at::Tensor& mixed, const at::Tensor& y,
                                      const at::Tensor& rstd) {
  const Values values(parameters);
  return normed_gate_apply(y, by_head(Rows(shape_, mixed).z), values.norm, rstd).flatten(2);
}

at::Tensor GatedDeltaCore::decode(const at::Tensor& mixed, RecurrentState& state,
                                  const RaggedBatch& batch) {
  const at::NoGradGuard no_grad;
  const int64_t t = mixed.size(0), back = shape_.conv_size - 1;
  const Values values(parameters);
  const Rows rows(shape_, mixed);
  const at::ScalarType type = accumulate_type(mixed);
  const at::Tensor conv_rows = state.conv_rows(batch.num_slots, back, shape_.conv_channels(),
                                               mixed.options()),
                   states = state.states(batch.num_slots,
                                         {shape_.value_heads, shape_.key_size, shape_.value_size},
                                         mixed.options().dtype(type));
  const at::Tensor convolved = at::empty({t, 1, shape_.conv_channels()}, mixed.options());
  const DecodingSteps steps(batch, mixed.device());
  steps.convolve(rows.u, values.conv_weight, {}, conv_rows, convolved);
  const DeltaOperands whole = operands(convolved, rows, values);
  const at::Tensor y = at::empty(whole.v.sizes(), mixed.options());
  const auto rows_of = [&](int64_t first, int64_t count) -> RowOperands {
    return {convolved.narrow(0, first, count),
            at::cat({whole.g.narrow(0, first, count), whole.beta.narrow(0, first, count)}, 2)};
  };
  const LastChunk last = state.replays_chunks() ? LastChunk::kFilled : LastChunk::kShort;
  const RowScan scan = [&](const RowOperands& own, const ScanState& initial) -> ScanOutput {
    DeltaOperands o = heads(own.rows, own.steps.narrow(2, 0, shape_.value_heads),
                            own.steps.narrow(2, shape_.value_heads, shape_.value_heads));
    o.q = unit_length(o.q);
    o.k = unit_length(o.k);
    const DeltaResult result = delta_rule(o, initial, chunk_, last);
    return {result.o.flatten(2), result.state};
  };
  const RowOperands open = state.open_rows(batch.num_slots, chunk_, rows_of(0, 1));
  if (state.replays_chunks()) {
    replay_chunks(batch, chunk_, rows_of(0, t), open, states, scan, y.flatten(2));
    return normed_gate(y, by_head(rows.z), values.norm, eps_).o.flatten(2);
  }
  for (const DecodingSteps::Step& step : steps.all()) {
    if (step.has_drafts()) {
      scan_drafts(step, rows_of(step.first, step.count), open, states, scan,
                  y.flatten(2).narrow(0, step.first, step.count));
      continue;
    }
    const DeltaOperands own{step.rows_of(whole.q), step.rows_of(whole.k),    step.rows_of(whole.v),
                            step.rows_of(whole.g), step.rows_of(whole.beta), {}};
    const ScanState initial{step.states_of(states, type)};
    const DeltaResult result =
        step.count == 1 ? delta_steps(own, initial) : delta_rule(own, initial, chunk_);
    step.rows_of(y).copy_(result.o);
    step.keep(result.state, states);
  }
  return normed_gate(y, by_head(rows.z), values.norm, eps_).o.flatten(2);
}

}  // namespace megatron
