#include "megatron/training/proving/prove.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/layer_division.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/proving/exact_update.h"
#include "megatron/training/proving/proof_buckets.h"
#include "megatron/training/proving/rounding_band.h"
#include "megatron/training/proving/routing_band.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/config/proof/proof_size.h"
#include "megatron/transformer/moe/moe_layer.h"
#include "megatron/transformer/moe/routing_replay.h"

namespace megatron {

namespace {

// The largest divisor of `value` that is at most `limit`.
int64_t divisor_up_to(int64_t value, int64_t limit) {
  int64_t best = 1;
  for (int64_t d = 1; d <= std::min(value, limit); ++d)
    if (value % d == 0) best = d;
  return best;
}

// An axis of several ranks keeps several: the largest divisor up to the limit, or if there is none
// (a prime) another length of the same parity.
int64_t shorter_axis(int64_t length, int64_t limit) {
  const int64_t divisor = divisor_up_to(length, limit);
  if (divisor > 1 || length == 1 || limit < 2) return divisor;
  return limit > 2 && limit % 2 == 0 && length % 2 == 1 ? limit - 1 : limit;
}

// Two levels of context ranks stay two if the limit allows it.
void shrink_context_ranks(ParallelConfig& p, Shrinker& shrinker, int64_t max_axis) {
  std::vector<int64_t>& levels = p.hierarchical_context_parallel_sizes;
  int64_t size = shorter_axis(p.context_parallel_size, max_axis);
  if (levels.size() == 2 && p.context_parallel_size > max_axis) {
    const int64_t inner =
        shorter_axis(levels[0], levels[1] > 1 ? std::max<int64_t>(1, max_axis / 2) : max_axis);
    const int64_t outer = shorter_axis(levels[1], max_axis / inner);
    shrinker.note(cat("--hierarchical-context-parallel-sizes ", levels[0], " ", levels[1], " -> ",
                      inner, " ", outer));
    shrinker.keep_several("context ranks of the inner level", levels[0], inner);
    shrinker.keep_several("context ranks of the outer level", levels[1], outer);
    levels = {inner, outer};
    size = inner * outer;
  }
  shrinker.keep_several("context ranks", p.context_parallel_size, size);
  shrinker.set("--context-parallel-size", p.context_parallel_size, size);
}

// The encoders' own.
void shrink_encoder_ranks(Arguments& a, Shrinker& shrinker, int64_t max_axis) {
  if (!a.encoder_ranks().any()) return;
  auto& own = own_config<MimoConfig>(a.own);
  const auto shrink = [&](const char* flag, const char* what, int64_t& size) {
    const int64_t shorter = shorter_axis(size, max_axis);
    shrinker.keep_several(what, size, shorter);
    shrinker.set(flag, size, shorter);
  };
  shrink("--encoder-tensor-model-parallel-size", "tensor ranks of encoders",
         own.encoder_tensor_model_parallel_size);
  shrink("--encoder-data-parallel-size", "data ranks of encoders", own.encoder_data_parallel_size);
}

void shrink_mesh(Arguments& a, Shrinker& shrinker, int64_t max_axis) {
  ParallelConfig& p = a.parallel;
  const int64_t dp_before = a.data_parallel_size();
  const int64_t tp = shorter_axis(p.tensor_model_parallel_size, max_axis);
  shrinker.keep_several("tensor ranks", p.tensor_model_parallel_size, tp);
  shrinker.set("--tensor-model-parallel-size", p.tensor_model_parallel_size, tp);
  shrink_context_ranks(p, shrinker, max_axis);
  const int64_t dp = shorter_axis(dp_before, max_axis);
  shrinker.keep_several("data ranks", dp_before, dp);
  shrink_encoder_ranks(a, shrinker, max_axis);
  shrinker.set("data-parallel ranks", a.world_size,
               a.encoder_ranks().count() + p.tensor_model_parallel_size * p.context_parallel_size *
                                               p.pipeline_model_parallel_size * dp);
}

// Ranks that hold the same dense weights, and the same experts.
struct Holders {
  int64_t dense = 1, experts = 1;
};

Holders holders_of(const Arguments& a) {
  const ParallelConfig& p = a.parallel;
  const int64_t dense = a.data_parallel_size() * p.context_parallel_size;
  if (!a.transformer.has_moe()) return {dense, dense};
  return {dense, dense * p.tensor_model_parallel_size /
                     (p.expert_model_parallel_size * p.expert_tensor_size())};
}

// Instances of the distributed optimizer that divide both. Those that had several shards of a
// weight keep several.
int64_t fewer_instances(const Holders& before, int64_t instances, const Holders& now) {
  const auto fit = [&](int64_t count_before, int64_t count, int64_t fewer) {
    return count % fewer == 0 && count / fewer >= std::min<int64_t>(count_before / instances, 2);
  };
  for (int64_t fewer = instances; fewer > 1; --fewer)
    if (fit(before.dense, now.dense, fewer) && fit(before.experts, now.experts, fewer))
      return fewer;
  return 1;
}

void shrink_instances(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  int64_t& instances = a.ddp.num_distributed_optimizer_instances;
  const Holders then = holders_of(before), now = holders_of(a);
  const int64_t fewer = fewer_instances(then, instances, now);
  shrinker.keep_several("instances of the distributed optimizer", instances, fewer);
  shrinker.keep_several("ranks that share optimizer states", then.dense / instances,
                        now.dense / fewer);
  if (a.transformer.has_moe())
    shrinker.keep_several("ranks that share optimizer states of experts", then.experts / instances,
                          now.experts / fewer);
  shrinker.set("--num-distributed-optimizer-instances", instances, fewer);
}

// Ranks of experts that fit the shorter axes, of which there are several where there were.
void shrink_expert_ranks(Arguments& a, const Arguments& before, Shrinker& shrinker,
                         int64_t max_axis) {
  if (!a.transformer.has_moe()) return;
  const ParallelConfig& old = before.parallel;
  ParallelConfig& p = a.parallel;
  const int64_t dense = a.data_parallel_size() * p.context_parallel_size,
                stage = p.tensor_model_parallel_size * dense,
                tensor_before = old.expert_tensor_size(), data_before = holders_of(before).experts,
                instances = a.ddp.num_distributed_optimizer_instances;
  const auto kept = [](int64_t count_before, int64_t count) {
    return std::min<int64_t>(count_before, 2) <= count ? 1 : 0;
  };
  // With the rank order tensor, pipeline, data the others may not fit.
  int64_t tensor = p.expert_tensor_parallel_size ? 1 : p.tensor_model_parallel_size,
          expert = p.use_tp_pp_dp_mapping ? stage / a.data_parallel_size() / tensor : 1;
  int best = -1;
  for (int64_t e = 1; e <= std::min(old.expert_model_parallel_size, max_axis); ++e)
    for (int64_t x = 1; x <= std::min(tensor_before, max_axis); ++x) {
      if (!p.expert_tensor_parallel_size && x != p.tensor_model_parallel_size) continue;
      if (stage % (e * x) != 0) continue;
      if (p.use_tp_pp_dp_mapping && stage / (e * x) != a.data_parallel_size()) continue;
      const int score =
          kept(old.expert_model_parallel_size, e) + kept(tensor_before, x) +
          kept(data_before, stage / (e * x)) +
          kept(instances, fewer_instances(holders_of(before), instances, {dense, stage / (e * x)}));
      if (score < best) continue;
      best = score;
      expert = e;
      tensor = x;
    }
  shrinker.keep_several("expert ranks", old.expert_model_parallel_size, expert);
  shrinker.keep_several("tensor ranks of experts", tensor_before, tensor);
  shrinker.keep_several("data ranks of experts", data_before, stage / (expert * tensor));
  shrinker.set("--expert-model-parallel-size", p.expert_model_parallel_size, expert);
  if (p.expert_tensor_parallel_size)
    shrinker.set("--expert-tensor-parallel-size", p.expert_tensor_parallel_size, tensor);
}

// The same part of the sequence.
void shrink_documents(Arguments& a, Shrinker& shrinker, int64_t length_before) {
  std::optional<int64_t>& most = a.parallel.max_seqlen_per_dp_cp_rank;
  if (!most) return;
  const int64_t length = a.transformer.seq_length;
  const auto ranks =
      static_cast<uint64_t>(a.data_parallel_size() * a.parallel.context_parallel_size);
  const auto widest = static_cast<int64_t>(std::bit_floor(ranks));
  shrinker.set("--max-seqlen-per-dp-cp-rank", most,
               std::max(*most * length / length_before, (length + widest - 1) / widest));
}

// Samples of a tiny micro-batch.
int64_t few_samples(const Arguments& a) { return one_or_several(a.training.micro_batch_size); }

ProofRanks ranks_of_layers(const Arguments& a) {
  const ParallelConfig& p = a.parallel;
  const std::vector<int64_t>& levels = p.hierarchical_context_parallel_sizes;
  return {p.tensor_model_parallel_size, p.context_parallel_size, levels.empty() ? 1 : levels[0],
          few_samples(a)};
}

ExpertProofRanks ranks_of_experts(const ParallelConfig& p) {
  return {p.expert_model_parallel_size, p.expert_tensor_size(), p.tensor_model_parallel_size};
}

// Whether a pattern of parameter names may contain layer numbers.
bool names_layers(const Arguments& a) {
  std::vector<std::string> patterns = a.training.freeze;
  patterns.insert(patterns.end(), a.training.freeze_except.begin(), a.training.freeze_except.end());
  for (const LrFactor& of : a.optimizer.rate_factors()) patterns.push_back(of.name);
  return std::any_of(patterns.begin(), patterns.end(), [](const std::string& pattern) {
    return pattern.find_first_of("0123456789") != std::string::npos;
  });
}

// Model chunks that divide the layers evenly; none: an uneven division (a layout, counts of the
// first and last stage) and names of layers need the number of layers as it is.
std::optional<int64_t> even_segments(const Arguments& a) {
  const PipelineConfig& p = a.pipeline;
  const int64_t pp = a.parallel.pipeline_model_parallel_size;
  if (names_layers_of_stages(p) || names_layers(a)) return {};
  return pp *
         p.num_virtual_stages_per_pipeline_rank.value_or(
             schedule_placement(p.pipeline_schedule) == ChunkPlacement::kVShaped && pp > 1 ? 2 : 1);
}

// Fields that say what a run does around its steps get their defaults.
void forget_run(Arguments& a) {
  Arguments defaults;
  std::map<std::string, FieldValue> values;
  for (const FieldInfo& field : describe_fields(defaults.configs()))
    if (field.role == FieldRole::kRun) values[field.name] = field.value;
  assign_fields(a.configs(), values);
}

// How parts that only the task has are computed gets its defaults.
void forget_own_machine(Arguments& a) {
  const auto own_configs_of = [](Arguments& of) {
    std::vector<Config*> configs;
    for (OwnConfig& own : of.own)
      if (own.config() != nullptr) configs.push_back(own.config());
    return configs;
  };
  Arguments defaults;
  std::map<std::string, FieldValue> values;
  for (const FieldInfo& field : describe_fields(own_configs_of(defaults)))
    if (field.role == FieldRole::kMachine) values[field.name] = field.value;
  assign_fields(own_configs_of(a), values);
}

// The user's own schedule over the steps of the proof, at a learning rate that moves the weights.
void shrink_schedule(Arguments& a, const ParameterSchedule& user, double lr, int num_steps) {
  OptimizerConfig& o = a.optimizer;
  const auto steps = static_cast<double>(num_steps);
  // The part of the training over which it decays, at least two steps
  const double decay = std::clamp(user.lr_decay_steps / user.weight_decay_incr_steps * steps,
                                  std::min(2.0, steps), 100 * steps);
  const auto of_decay = [&](double samples) { return samples / user.lr_decay_steps; };
  o.lr_decay_samples = o.lr_wsd_decay_samples = {};
  o.lr_decay_iters = std::llround(decay);
  if (o.lr_decay_style == LrDecayStyle::kWsd)
    o.lr_wsd_decay_iters = std::clamp<int64_t>(std::llround(of_decay(user.wsd_decay_steps) * decay),
                                               1, *o.lr_decay_iters);
  const double warmup = of_decay(user.lr_warmup_steps);
  o.lr_warmup_iters = o.lr_warmup_samples = 0;
  o.lr_warmup_fraction = {};
  if (warmup > 0) o.lr_warmup_fraction = std::min(std::max(warmup, 1 / decay), 1 - 0.5 / decay);
  const double factor = lr / o.lr.value_or(lr);
  for (double* rate : {&o.min_lr, &o.lr_warmup_init}) *rate *= factor;
  for (std::optional<double>* rate : {&o.decoupled_lr, &o.decoupled_min_lr})
    if (*rate) **rate *= factor;
  o.lr = lr;
  a.training.train_iters = num_steps;
}

void forget_graphs(TrainingConfig& training) {
  training.enable_cuda_graph = false;
  training.cuda_graph_impl = CudaGraphImpl::kNone;
}

// In a step of the run that is past any growth of the batch.
int64_t most_microbatches(const Arguments& a) {
  return a.microbatches().num_microbatches(std::numeric_limits<int64_t>::max());
}

// A batch that grows does so after the first step, if it has several micro-batches then.
// The tiny pattern names its segments, which cost may have divided.
void shrink_letters(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  if (names_layers(a)) return;
  const StageLayout stages = divide_layers(before, likely_vocabulary(before), provide_model());
  shrink_pattern(a.transformer, stages.layer_counts(), shrinker);
  a.pipeline.decoder_first_pipeline_num_layers = {};
  a.pipeline.decoder_last_pipeline_num_layers = {};
}

void shrink_batch(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  TrainingConfig& t = a.training;
  const int64_t pp = a.parallel.pipeline_model_parallel_size;
  const int64_t group = pp == 1 ? 1 : a.pipeline.microbatch_group_size_per_vp_stage.value_or(pp);
  const int64_t most = most_microbatches(before), microbatches = std::min(most, 2 * group);
  shrinker.set("--micro-batch-size", t.micro_batch_size, few_samples(a));
  const int64_t pass = t.micro_batch_size * a.data_parallel_size();
  if (before.microbatches().num_microbatches(0) == most || microbatches <= group) {
    shrinker.set("--global-batch-size", t.global_batch_size, pass * microbatches);
    return;
  }
  const int64_t first = pass * group;
  t.step_batch_size_schedule =
      cat("0:", first, " ", first * sample_size(a.transformer).tokens, ":", pass * microbatches);
  shrinker.note(cat("--step-batch-size-schedule \"", before.training.step_batch_size_schedule,
                    "\" -> \"", t.step_batch_size_schedule, "\""));
}

// Micro-batches of another size than those of training, and several of them, stay so.
void shrink_evaluation(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  TrainingConfig& t = a.training;
  t.eval_iters = std::min<int64_t>(before.training.eval_iters, 2);
  a.data.full_validation = before.data.full_validation;
  a.data.multiple_validation_sets = before.data.multiple_validation_sets;
  const int64_t micro = before.eval_micro_batch_size();
  if (micro != before.training.micro_batch_size) {
    t.eval_micro_batch_size = 2 * t.micro_batch_size;
    shrinker.note(cat("--eval-micro-batch-size ", micro, " -> ", *t.eval_micro_batch_size));
  } else if (!before.training.eval_global_batch_size && t.global_batch_size) {
    return;  // that of training
  }
  const int64_t passes = before.eval_global_batch_size() / (micro * before.data_parallel_size());
  shrinker.set("--eval-global-batch-size", t.eval_global_batch_size,
               a.eval_micro_batch_size() * one_or_several(passes) * a.data_parallel_size());
}

void shrink_run(Arguments& a, const Arguments& before, Shrinker& shrinker, int num_steps,
                bool on_gpu) {
  forget_run(a);
  TrainingConfig& t = a.training;
  shrink_batch(a, before, shrinker);
  shrink_evaluation(a, before, shrinker);
  if (!on_gpu) {
    if (t.uses_cuda_graphs()) shrinker.note("without CUDA graphs");
    t.device = DeviceChoice::kCpu;
    forget_graphs(t);
  }
  a.data.mock_data = true;
  a.data.num_workers = 0;
  shrink_weights(a.transformer);
  const UpdateRule& rule = update_rule(a.optimizer);
  if (rule.bound_rounding != nullptr) {
    std::string change = rule.bound_rounding(a.optimizer);
    if (!change.empty()) shrinker.note(std::move(change));
  }
  shrink_schedule(a, make_schedule(before.optimizer, before.train_length()), rule.few_steps_lr,
                  num_steps);
}

const char* type_name(at::ScalarType dtype) {
  return dtype == at::kDouble     ? "fp64"
         : dtype == at::kFloat    ? "fp32"
         : dtype == at::kBFloat16 ? "bf16"
                                  : "fp16";
}

// How much of the limit was used.
double used(const Comparison& c) {
  if (c.difference == 0) return 0;
  return c.allowed > 0 && !std::isnan(c.difference) ? c.difference / c.allowed : HUGE_VAL;
}

Proof summarize(at::ScalarType dtype, const char* claim, const std::vector<Comparison>& comparisons,
                std::vector<std::string> faults) {
  Proof proof;
  proof.dtype = type_name(dtype);
  proof.claim = claim;
  proof.faults = std::move(faults);
  for (int i = 0; i < kNumQuantities; ++i) {
    ProofLine line;
    line.quantity = name_of(static_cast<Quantity>(i));
    const Comparison* worst = nullptr;
    for (const Comparison& c : comparisons) {
      if (c.quantity != static_cast<Quantity>(i)) continue;
      ++line.compared;
      // Later steps fail as a consequence; the worst comparison of the first failing step is nearer
      // to the cause.
      if (!c.holds() && ++line.failed == 1) worst = nullptr;
      if (line.failed > 0 && (c.holds() || (worst != nullptr && c.step != worst->step))) continue;
      if (worst == nullptr || used(c) > used(*worst)) worst = &c;
    }
    if (worst == nullptr) continue;
    line.worst = worst->name;
    line.difference = worst->difference;
    line.allowed = worst->allowed;
    proof.lines.push_back(std::move(line));
  }
  return proof;
}

using Tracer = std::function<TrainingTrace(const Arguments&, const TraceOptions&, bool parallel)>;

Tracer tracer_of_threads(const PretrainTask& task) {
  return [&task](const Arguments& arguments, const TraceOptions& options, bool) {
    return trace_training(task, arguments, options);
  };
}

// What rounds on purpose cannot be followed in fp64.
Arguments without_rounding(Arguments arguments) {
  arguments.ddp.grad_reduce_in_bf16 = false;
  arguments.transformer.remove_quantization();
  OptimizerConfig& o = arguments.optimizer;
  o.main_params_dtype = o.exp_avg_dtype = o.exp_avg_sq_dtype = StateType::kFp32;
  return arguments;
}

// In fp64, where only rounding of 1e-16 can differ.
Proof prove_exactly(const Tracer& tracer, const Arguments& arguments, int num_steps, bool speaks) {
  Arguments layout = without_rounding(arguments);
  // Graphs are those of the run's own kernels.
  forget_graphs(layout.training);
  TraceOptions options;
  options.num_steps = num_steps;
  // The serial run is on the first rank only; the others wait for it.
  const TrainingTrace serial =
      speaks ? tracer(serial_arguments(layout), options, false) : TrainingTrace{};
  const TrainingTrace trace = tracer(layout, options, true);
  if (!speaks) return {};
  std::vector<Comparison> comparisons = compare_traces(trace, serial, kExactBand);
  std::vector<GrownRounding> grown;
  if (!std::ranges::all_of(comparisons, &Comparison::holds)) {
    options.disturbance = kRoundingOfWeights;
    grown = allow_grown_rounding(comparisons, tracer(serial_arguments(layout), options, false),
                                 serial, kExactBand);
  }
  Proof proof = summarize(at::kDouble, "exact up to 1e-9", comparisons, trace.faults);
  for (const GrownRounding& g : grown) {
    const std::string where = g.step > 0 ? cat("in step ", g.step) : "after the last step";
    proof.not_proved.push_back(g.band < 1
                                   ? cat("errors below ", format_text("%.0e", g.band), " ", where,
                                         ", where a rounding of the weights has grown so far")
                                   : cat("what is ", where, ", of which rounding leaves nothing"));
  }
  return proof;
}

// Work is counted in forwards and backwards of a layer so narrow that starting its kernels takes
// longest; two cores do kWorkOfRounding of them, or of kOperations of products, in about ten
// seconds.
constexpr double kWorkOfRounding = 16384, kOperations = 1e7;

// As many steps as fit, or the fewest in up to twice that time; else none.
int rounding_steps(const PretrainTask& task, const Arguments& layout, bool thorough) {
  if (thorough) return kThoroughSteps;
  const SampleSize sample = sample_size(layout.transformer);
  const int64_t vocabulary = *layout.tokenizer.vocab_size;
  const auto layers = static_cast<double>(sample.layers);
  const double products = task.flops_per_token(layout, {vocabulary, vocabulary}) *
                          static_cast<double>(layout.training.micro_batch_size * sample.tokens) /
                          kOperations;
  // Each rank starts its own kernels; context ranks compute attention in parts.
  const auto tp = static_cast<double>(layout.parallel.tensor_model_parallel_size),
             cp = static_cast<double>(layout.parallel.context_parallel_size);
  const double work = 2 * (layers + products) + layers * tp * cp * (3 + cp) / 4 + products;
  const auto passes = static_cast<double>(most_microbatches(layout) * layout.data_parallel_size());
  const double steps = kWorkOfRounding / (passes * work);
  if (2 * steps < kFewestRoundingSteps) return 0;
  return static_cast<int>(std::clamp<double>(steps, kFewestRoundingSteps, kRoundingSteps));
}

// Elements that are not numbers count as held by no rank, which is a fault.
bool all_finite(const TrainingTrace& trace) {
  if (!trace.faults.empty()) return false;
  for (const TracedStep& step : trace.steps)
    for (const auto& [name, grad] : step.grads)
      if (!grad.isfinite().all().item<bool>()) return false;
  return true;
}

// The trace of one rank. With fp16 the layout gets a loss scale at which that trace has no
// overflow, which would hide everything else.
TrainingTrace trace_one_rank(const Tracer& tracer, Arguments& layout, const TraceOptions& options) {
  constexpr double kStep = 64, kLeast = 1.0 / 4096;
  std::optional<double>& scale = layout.optimizer.loss_scale;
  // A dynamic loss scale finds its value by skipping steps.
  if (layout.optimizer.fp16 && !scale) scale = 128;
  for (;; scale = *scale / kStep) {
    TrainingTrace trace = tracer(serial_arguments(layout), options, false);
    if (!layout.optimizer.fp16 || *scale < kLeast || all_finite(trace)) return trace;
  }
}

// In the run's own type. No updates, after which the runs would differ by more than rounding: each
// step begins with weights of its own.
Proof prove_rounding(const PretrainTask& task, const Tracer& tracer, Arguments layout,
                     bool thorough, bool speaks) {
  const int num_steps = rounding_steps(task, layout, thorough);
  if (num_steps == 0) {
    Proof none;
    none.dtype = type_name(model_dtype(layout.optimizer));
    none.not_proved = {cat("what only ", none.dtype, " shows: ", kFewestRoundingSteps,
                           " steps of this model take too long without --thorough")};
    return none;
  }
  layout.training.train_iters = num_steps;
  // These round beyond what one rank does, and prove_updates() follows them to the bit.
  layout.ddp.grad_reduce_in_bf16 = false;
  const at::ScalarType dtype = model_dtype(layout.optimizer);
  TraceOptions own{dtype, num_steps, /*updates=*/false, dtype}, wide = own;
  wide.dtype = at::kDouble;
  // Rounding may change a router's choice, after which nothing is comparable: all go on with those
  // of one rank. What their routers would choose by themselves is compared beside it.
  RoutingTable choices;
  const RoutingReplay recorded{&choices, nullptr}, imposed{nullptr, &choices};
  const bool routes = layout.transformer.has_moe();
  own.routers = wide.routers = routes;
  if (routes) own.routing = &recorded;
  // Every rank finds the loss scale of fp16, and the choices.
  const TrainingTrace serial = speaks || layout.optimizer.fp16 || routes
                                   ? trace_one_rank(tracer, layout, own)
                                   : TrainingTrace{};
  if (routes) own.routing = wide.routing = &imposed;
  const TrainingTrace exact =
      speaks ? tracer(without_rounding(serial_arguments(layout)), wide, false) : TrainingTrace{};
  const TrainingTrace trace = tracer(layout, own, true);
  if (!speaks) return {};
  // Tensor and context ranks, and stages that divide the vocabulary, add up in another order, which
  // may move the largest value of a tensor. At an expert of several ranks rows of several
  // micro-batches meet, which the first step scales together.
  const bool rows_meet =
      layout.transformer.is_quantized() && layout.transformer.has_moe() &&
      (layout.parallel.expert_model_parallel_size > 1 || layout.parallel.expert_tensor_size() > 1);
  const bool one_order = layout.parallel.tensor_model_parallel_size == 1 &&
                         layout.parallel.context_parallel_size == 1 &&
                         !layout.pipeline.pipeline_vocab_parallel && !rows_meet;
  RoundingComparison compared = compare_rounding(trace, serial, exact, {dtype, one_order});
  const RoutingComparison routing = compare_routing(trace.routers, serial.routers, exact.routers,
                                                    routing_options(layout.transformer));
  compared.comparisons.insert(compared.comparisons.end(), routing.comparisons.begin(),
                              routing.comparisons.end());
  Proof proof = summarize(dtype, "may differ by rounding", compared.comparisons, trace.faults);
  proof.hidden = std::move(compared.hidden);
  proof.routed_tokens = routing.tokens;
  proof.routed_otherwise = routing.differing;
  if (routes && layout.transformer.uses_sinkhorn())
    proof.not_proved.push_back(
        "which experts tokens choose by themselves: Sinkhorn's choices depend on the rows of a "
        "rank");
  if (!one_order && !trace.states.empty())
    proof.not_proved.push_back(
        rows_meet
            ? "scales and histories of delayed scaling, since rows of several ranks meet at an "
              "expert"
            : "scales and histories of delayed scaling, since tensor or context ranks, or "
              "stages that divide the vocabulary, change the order of sums");
  return proof;
}

// In the run's own types, on gradients that no sum rounds.
Proof prove_updates(const Tracer& tracer, Arguments layout, bool speaks) {
  OptimizerConfig& o = layout.optimizer;
  shrink_schedule(layout, make_schedule(o, layout.train_length()), o.lr.value_or(1e-3),
                  kUpdateSteps);
  layout = exact_update_arguments(std::move(layout));
  const at::ScalarType dtype = model_dtype(o);
  TraceOptions options{dtype, kUpdateSteps, /*updates=*/true, dtype};
  options.gradients = [&layout](TrainedModel& model, const StepOptions& step, int index) {
    return report_exact_gradients(model, layout, step, index);
  };
  Arguments one = serial_arguments(layout);
  // A GPU and its host round an update differently: both runs make all of them on the host.
  if (o.optimizer_cpu_offload && layout.training.device != DeviceChoice::kCpu) {
    one.optimizer.optimizer_cpu_offload = true;
    layout.optimizer.optimizer_offload_fraction = one.optimizer.optimizer_offload_fraction = 1;
  }
  const TrainingTrace serial = speaks ? tracer(one, options, false) : TrainingTrace{};
  const TrainingTrace trace = tracer(layout, options, true);
  if (!speaks) return {};
  return summarize(dtype, "updates equal to the bit", compare_traces(trace, serial, 0),
                   trace.faults);
}

std::vector<Proof> prove_with(const PretrainTask& task, const Tracer& tracer,
                              const Arguments& arguments, int num_steps, bool thorough,
                              bool speaks) {
  std::vector<Proof> proofs = {prove_exactly(tracer, arguments, num_steps, speaks),
                               prove_rounding(task, tracer, arguments, thorough, speaks),
                               prove_updates(tracer, arguments, speaks)};
  return speaks ? proofs : std::vector<Proof>{};
}

void shrink_vocabulary(TokenizerConfig& tokenizer) {
  tokenizer = {};
  tokenizer.tokenizer_type = "NullTokenizer";
  tokenizer.vocab_size = 101;
  // So that every tensor rank has vocabulary rows, and some have padding
  tokenizer.make_vocab_size_divisible_by = 8;
}

}  // namespace

bool Proof::holds() const {
  return faults.empty() && std::all_of(lines.begin(), lines.end(),
                                       [](const ProofLine& line) { return line.failed == 0; });
}

Arguments serial_arguments(Arguments arguments) {
  // A loss over the micro-batches of all data ranks is one over a micro-batch of one rank.
  if (arguments.transformer.balance_coefficient("global_aux_loss") > 0)
    arguments.training.micro_batch_size *= arguments.data_parallel_size();
  const int64_t global_batch_size = arguments.training.global_batch_size.value_or(
      arguments.training.micro_batch_size * arguments.data_parallel_size());
  arguments.parallel = {};
  arguments.pipeline = {};
  arguments.ddp = {};
  static_cast<RecomputeConfig&>(arguments.transformer) = {};
  static_cast<OffloadConfig&>(arguments.transformer) = {};
  forget_own_machine(arguments);
  arguments.optimizer.optimizer_cpu_offload = false;
  // One rank computes padding, too: leaving it out is proved with the layout.
  arguments.training.remove_padding = RemovePadding::kFalse;
  forget_graphs(arguments.training);
  arguments.transformer.cross_entropy_fusion_impl = CrossEntropyFusion::kNative;
  arguments.world_size = 1;
  if (arguments.training.step_batch_size_schedule.empty())
    arguments.training.global_batch_size = global_batch_size;
  arguments.finalize();
  return arguments;
}

Shrunk shrink(const Arguments& arguments, int64_t max_axis, int num_steps, bool on_gpu) {
  Shrunk out{arguments, {}, {}};
  Shrinker shrinker(out.changes, out.lost);
  Arguments& a = out.arguments;
  shrink_mesh(a, shrinker, max_axis);
  shrink_expert_ranks(a, arguments, shrinker, max_axis);
  shrink_instances(a, arguments, shrinker);
  shrink_layer(a.transformer, ranks_of_layers(arguments), ranks_of_layers(a), shrinker);
  shrink_experts(a.transformer, arguments.transformer, ranks_of_experts(arguments.parallel),
                 ranks_of_experts(a.parallel), shrinker);
  remove_balance_by_rank(
      a.transformer,
      {a.parallel.context_parallel_size *
           (a.parallel.sequence_parallel ? a.parallel.tensor_model_parallel_size : 1),
       a.data_parallel_size(), a.training.calculate_per_token_loss},
      shrinker);
  shrink_documents(a, shrinker, arguments.transformer.seq_length);
  if (a.transformer.is_hybrid())
    shrink_letters(a, arguments, shrinker);
  else if (const std::optional<int64_t> segments = even_segments(a))
    shrink_depth(a.transformer, *segments, a.parallel.pipeline_model_parallel_size, shrinker);
  shrink_vocabulary(a.tokenizer);
  shrink_task(a, arguments, shrinker);
  shrink_run(a, arguments, shrinker, num_steps, on_gpu);
  a.finalize();
  Violations violations;
  for (Config* config : a.configs()) config->validate(violations);
  a.validate(violations);
  violations.throw_if_any();
  shrink_buckets(arguments, a, shrinker);
  return out;
}

std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         bool thorough) {
  return prove_with(task, tracer_of_threads(task), arguments, num_steps, thorough,
                    /*speaks=*/true);
}

Proof prove_updates(const PretrainTask& task, const Arguments& arguments) {
  return prove_updates(tracer_of_threads(task), arguments, /*speaks=*/true);
}

std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         const Job& job, c10::Device device, bool thorough) {
  const Job alone;
  return prove_with(
      task,
      [&](const Arguments& a, const TraceOptions& options, bool parallel) {
        return trace_training(task, a, options, parallel ? job : alone, device);
      },
      arguments, num_steps, thorough, job.is_first());
}

bool all_hold(const std::vector<Proof>& proofs, const Job& job) {
  const bool own =
      std::all_of(proofs.begin(), proofs.end(), [](const Proof& proof) { return proof.holds(); });
  const bool holds = !proofs.empty() && own;
  return job.agreement == nullptr ? holds
                                  : job.agreement->broadcast(holds ? "holds" : "fails") == "holds";
}

}  // namespace megatron
