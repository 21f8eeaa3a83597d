#include "megatron/training/proving/prove.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/transformer/config/proof_size.h"

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
    levels = {inner, outer};
    size = inner * outer;
  }
  shrinker.set("--context-parallel-size", p.context_parallel_size, size);
}

void shrink_mesh(Arguments& a, Shrinker& shrinker, int64_t max_axis) {
  ParallelConfig& p = a.parallel;
  const int64_t dp_before = a.data_parallel_size(),
                ranks_before = dp_before * p.context_parallel_size;
  shrinker.set("--tensor-model-parallel-size", p.tensor_model_parallel_size,
               shorter_axis(p.tensor_model_parallel_size, max_axis));
  shrink_context_ranks(p, shrinker, max_axis);
  const int64_t dp = shorter_axis(dp_before, max_axis), ranks = dp * p.context_parallel_size;
  shrinker.set(
      "data-parallel ranks", a.world_size,
      p.tensor_model_parallel_size * p.context_parallel_size * p.pipeline_model_parallel_size * dp);
  // Optimizer instances that had several shards keep several.
  int64_t& instances = a.ddp.num_distributed_optimizer_instances;
  if (ranks != ranks_before)
    shrinker.set("--num-distributed-optimizer-instances", instances,
                 instances == ranks_before
                     ? ranks
                     : divisor_up_to(ranks, std::min(instances, std::max<int64_t>(1, ranks / 2))));
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

// Whether a pattern of parameter names may contain layer numbers.
bool names_layers(const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [](const std::string& pattern) {
    return pattern.find_first_of("0123456789") != std::string::npos;
  });
}

// Model chunks that divide the layers evenly; none: an uneven division (a layout, counts of the
// first and last stage) and names of layers need the number of layers as it is.
std::optional<int64_t> even_segments(const Arguments& a) {
  const PipelineConfig& p = a.pipeline;
  const int64_t pp = a.parallel.pipeline_model_parallel_size;
  if (!p.pipeline_model_parallel_layout.empty() || p.decoder_first_pipeline_num_layers ||
      p.decoder_last_pipeline_num_layers || p.account_for_embedding_in_pipeline_split ||
      p.account_for_loss_in_pipeline_split || p.num_layers_per_virtual_pipeline_stage ||
      names_layers(a.training.freeze) || names_layers(a.training.freeze_except))
    return {};
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

void shrink_run(Arguments& a, Shrinker& shrinker, int64_t microbatches_before) {
  forget_run(a);
  TrainingConfig& t = a.training;
  const int64_t pp = a.parallel.pipeline_model_parallel_size;
  const int64_t group = a.pipeline.microbatch_group_size_per_vp_stage.value_or(pp);
  const int64_t wanted = pp == 1 ? 2 : 2 * group;
  const int64_t microbatches = std::min(microbatches_before, wanted);
  shrinker.set("--micro-batch-size", t.micro_batch_size, std::min<int64_t>(t.micro_batch_size, 2));
  shrinker.set("--global-batch-size", t.global_batch_size,
               t.micro_batch_size * microbatches * a.data_parallel_size());
  t.train_iters = 100;
  t.eval_iters = 0;
  t.device = DeviceChoice::kCpu;
  if (t.uses_cuda_graphs()) shrinker.note("without CUDA graphs");
  t.enable_cuda_graph = false;
  t.cuda_graph_impl = CudaGraphImpl::kNone;
  a.data.mock_data = true;
  a.data.num_workers = 0;
  a.tokenizer = {};
  a.tokenizer.tokenizer_type = "NullTokenizer";
  a.tokenizer.vocab_size = 101;
  // So that every tensor rank has vocabulary rows, and some have padding
  a.tokenizer.make_vocab_size_divisible_by = 8;
  // Types that round on purpose would hide differences of the layout.
  for (const auto& [flag, type] : {std::pair{"--main-params-dtype", &a.optimizer.main_params_dtype},
                                   {"--exp-avg-dtype", &a.optimizer.exp_avg_dtype},
                                   {"--exp-avg-sq-dtype", &a.optimizer.exp_avg_sq_dtype}}) {
    if (*type != StateType::kFp32) shrinker.note(cat(flag, " fp32"));
    *type = StateType::kFp32;
  }
  shrinker.set("--grad-reduce-in-bf16", a.ddp.grad_reduce_in_bf16, false);
  shrink_rounding(a.transformer, shrinker);
  // A dynamic loss scale finds its value by skipping steps; there are too few steps here.
  if (a.optimizer.fp16 && !a.optimizer.loss_scale) {
    a.optimizer.loss_scale = 1024;
    shrinker.note("--loss-scale 1024");
  }
  const UpdateRule& rule = update_rule(a.optimizer);
  if (rule.bound_rounding != nullptr) {
    std::string change = rule.bound_rounding(a.optimizer);
    if (!change.empty()) shrinker.note(std::move(change));
  }
  // A schedule that moves the weights in the few steps that are run.
  a.optimizer.lr = rule.few_steps_lr;
  a.optimizer.lr_warmup_iters = 0;
  a.optimizer.lr_warmup_samples = 0;
  a.optimizer.lr_warmup_fraction.reset();
  a.optimizer.lr_decay_iters.reset();
  a.optimizer.lr_decay_samples.reset();
  a.optimizer.lr_decay_style = LrDecayStyle::kConstant;
}

const char* name_of(at::ScalarType dtype) {
  return dtype == at::kDouble     ? "fp64"
         : dtype == at::kFloat    ? "fp32"
         : dtype == at::kBFloat16 ? "bf16"
                                  : "fp16";
}

const char* quantity_of(const std::string& name) {
  if (name.find("gradient norm") != std::string::npos) return "gradient norm";
  if (name.find("clip factor") != std::string::npos) return "clip factor";
  if (name.find("gradient of") != std::string::npos) return "gradients";
  if (name.starts_with("updated")) return "updated weights";
  return "loss";
}

// "step 2" of "step 2 gradient of ..."; empty for quantities that are compared once.
std::string step_of(const std::string& name) {
  return name.starts_with("step ") ? name.substr(0, name.find(' ', 5)) : "";
}

double excess(const Comparison& c) {
  if (c.holds()) return c.allowed > 0 ? c.difference / c.allowed : 0;
  return c.allowed > 0 && std::isfinite(c.difference) ? std::max(c.difference / c.allowed, 1.0)
                                                      : HUGE_VAL;
}

Proof summarize(at::ScalarType dtype, const std::vector<Comparison>& comparisons,
                std::vector<std::string> faults) {
  Proof proof;
  proof.dtype = name_of(dtype);
  proof.faults = std::move(faults);
  for (const char* quantity :
       {"loss", "gradient norm", "clip factor", "gradients", "updated weights"}) {
    ProofLine line;
    line.quantity = quantity;
    double worst = -1;
    std::string failed_step;
    for (const Comparison& c : comparisons) {
      if (line.quantity != quantity_of(c.name)) continue;
      ++line.compared;
      // Later steps fail as a consequence; the worst comparison of the first failing step is nearer
      // to the cause.
      if (!c.holds() && ++line.failed == 1) {
        failed_step = step_of(c.name);
        worst = -1;
      }
      if (line.failed > 0 && (c.holds() || step_of(c.name) != failed_step)) continue;
      if (excess(c) <= worst) continue;
      worst = excess(c);
      line.worst = c.name;
      line.difference = c.difference;
      line.allowed = c.allowed;
    }
    proof.lines.push_back(std::move(line));
  }
  return proof;
}

// Tolerance of each comparison in the run's own type: a multiple of the distance between the serial
// runs in this type and in fp64. A single tensor may be close by chance, so the distance over all
// tensors of its kind is also allowed. Loss, gradient norm and clip factor are one number each:
// they need not be closer than the gradients as a whole.
std::vector<Comparison> compare_rounded(const TrainingTrace& trace, const TrainingTrace& serial,
                                        const TrainingTrace& exact) {
  std::vector<Comparison> out = compare_traces(trace, serial, 0);
  const std::vector<Comparison> rounding = compare_traces(serial, exact, 0);
  // Norms of the quantities: the allowed differences for a relative tolerance of 1.
  const std::vector<Comparison> sizes = compare_traces(serial, exact, 1);
  std::map<std::string, std::pair<double, double>> of_kind;  // squares of distance and size
  for (size_t i = 0; i < rounding.size(); ++i) {
    auto& [distance, size] = of_kind[quantity_of(rounding[i].name)];
    distance += rounding[i].difference * rounding[i].difference;
    size += sizes[i].allowed * sizes[i].allowed;
  }
  const auto relative_of = [&](const std::string& kind) {
    const auto& [distance, size] = of_kind[kind];
    return size > 0 ? std::sqrt(distance / size) : 0;
  };
  MEGATRON_ASSERT(out.size() >= rounding.size());
  for (size_t i = 0; i < rounding.size(); ++i) {
    if (out[i].name != rounding[i].name) continue;  // a missing quantity remains a failure
    const double relative =
        std::max(relative_of(quantity_of(out[i].name)), relative_of("gradients"));
    out[i].allowed = kRoundingBand * (rounding[i].difference + relative * sizes[i].allowed);
  }
  return out;
}

using Tracer =
    std::function<TrainingTrace(const Arguments&, at::ScalarType, int steps, bool parallel)>;

std::vector<Proof> prove_with(const Tracer& tracer, const Arguments& arguments, int num_steps,
                              bool speaks) {
  const Arguments one = serial_arguments(arguments);
  const at::ScalarType dtype = model_dtype(arguments.optimizer);
  std::vector<Proof> proofs;
  // The serial run is on the first rank only; the others wait for it.
  const TrainingTrace exact = speaks ? tracer(one, at::kDouble, num_steps, false) : TrainingTrace{};
  TrainingTrace layout = tracer(arguments, at::kDouble, num_steps, true);
  if (speaks)
    proofs.push_back(
        summarize(at::kDouble, compare_traces(layout, exact, kExactBand), layout.faults));
  // One step only: after an update the runs differ by more than rounding.
  const TrainingTrace serial = speaks ? tracer(one, dtype, 1, false) : TrainingTrace{};
  layout = tracer(arguments, dtype, 1, true);
  if (!speaks) return proofs;
  TrainingTrace first = exact;
  first.steps.resize(1);
  first.weights = {};
  TrainingTrace serial_grads = serial, layout_grads = layout;
  serial_grads.weights = layout_grads.weights = {};
  proofs.push_back(
      summarize(dtype, compare_rounded(layout_grads, serial_grads, first), layout.faults));
  return proofs;
}

}  // namespace

bool Proof::holds() const {
  return faults.empty() && std::all_of(lines.begin(), lines.end(),
                                       [](const ProofLine& line) { return line.failed == 0; });
}

Arguments serial_arguments(Arguments arguments) {
  const int64_t global_batch_size = arguments.training.global_batch_size.value_or(
      arguments.training.micro_batch_size * arguments.data_parallel_size());
  arguments.parallel = {};
  arguments.pipeline = {};
  arguments.ddp = {};
  arguments.transformer.cross_entropy_fusion_impl = CrossEntropyFusion::kNative;
  arguments.world_size = 1;
  arguments.training.global_batch_size = global_batch_size;
  arguments.finalize();
  return arguments;
}

Shrunk shrink(const Arguments& arguments, int64_t max_axis) {
  Shrunk out{arguments, {}};
  Shrinker shrinker(out.changes);
  Arguments& a = out.arguments;
  const int64_t microbatches = arguments.microbatches().num_microbatches(0);
  shrink_mesh(a, shrinker, max_axis);
  shrink_layer(a.transformer,
               {arguments.parallel.tensor_model_parallel_size,
                a.parallel.tensor_model_parallel_size, a.parallel.context_parallel_size},
               shrinker);
  shrink_documents(a, shrinker, arguments.transformer.seq_length);
  if (const std::optional<int64_t> segments = even_segments(a))
    shrink_depth(a.transformer, *segments, shrinker);
  shrink_run(a, shrinker, microbatches);
  a.finalize();
  Violations violations;
  for (Config* config : a.configs()) config->validate(violations);
  a.validate(violations);
  violations.throw_if_any();
  return out;
}

std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps) {
  return prove_with([&](const Arguments& a, at::ScalarType dtype, int steps,
                        bool) { return trace_training(task, a, dtype, steps); },
                    arguments, num_steps, /*speaks=*/true);
}

std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         const Job& job, c10::Device device) {
  const Job alone;
  return prove_with(
      [&](const Arguments& a, at::ScalarType dtype, int steps, bool parallel) {
        return trace_training(task, a, dtype, steps, parallel ? job : alone, device);
      },
      arguments, num_steps, job.is_first());
}

bool all_hold(const std::vector<Proof>& proofs, const Job& job) {
  const bool own =
      std::all_of(proofs.begin(), proofs.end(), [](const Proof& proof) { return proof.holds(); });
  const bool holds = !proofs.empty() && own;
  return job.agreement == nullptr ? holds
                                  : job.agreement->broadcast(holds ? "holds" : "fails") == "holds";
}

}  // namespace megatron
