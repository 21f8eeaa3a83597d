#include "megatron/training/proving/equivalence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/dynamic_context/dynamic_context_batches.h"
#include "megatron/training/evaluation.h"
#include "megatron/training/proving/proof_data.h"
#include "megatron/transformer/config/proof/proof_size.h"
#include "megatron/transformer/moe/routing_replay.h"

namespace megatron {

namespace {

// One rank's part of a logical tensor, as it is sent between processes.
struct Part {
  std::string name;
  std::vector<int64_t> global_shape;
  ShardPiece piece;
  at::Tensor values;  // values of the piece, fp64, contiguous
};

// Assembles the parts of all ranks and checks for gaps and for replicas that differ.
class Assembly {
 public:
  void add(const Part& part) {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[part.name];
    if (!entry.values.defined()) {
      entry.values = at::zeros(part.global_shape, at::kDouble);
      entry.held = at::zeros(part.global_shape, at::kBool);
    }
    at::Tensor values = entry.values, held = entry.held;
    for (size_t d = 0; d < part.piece.global.shape.size(); ++d) {
      values = values.narrow(static_cast<int64_t>(d), part.piece.global.offset[d],
                             part.piece.global.shape[d]);
      held = held.narrow(static_cast<int64_t>(d), part.piece.global.offset[d],
                         part.piece.global.shape[d]);
    }
    // NaN marks elements that the shard does not hold.
    const at::Tensor given = part.values.view(values.sizes());
    const at::Tensor here = at::isnan(given).logical_not_();
    const at::Tensor both = held.logical_and(here);
    if (values.ne(given).logical_and(both).any().item<bool>()) entry.copies_differ = true;
    values.copy_(at::where(here, given, values));
    held.logical_or_(here);
  }

  // `whole`: some rank must hold every element.
  LogicalTensors take(const std::string& prefix, std::vector<std::string>& faults,
                      bool whole = true) {
    LogicalTensors out;
    for (auto& [name, entry] : entries_) {
      if (!name.starts_with(prefix)) continue;
      const std::string parameter = name.substr(prefix.size());
      if (whole && !entry.held.all().item<bool>())
        faults.push_back(cat(name, ": no rank holds all of it, or it is not a number"));
      if (entry.copies_differ) faults.push_back(cat(name, ": copies on different ranks differ"));
      out[parameter] = entry.values;
    }
    return out;
  }

 private:
  struct Entry {
    at::Tensor values, held;
    bool copies_differ = false;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

void append(std::string& text, const void* data, size_t bytes) {
  text.append(static_cast<const char*>(data), bytes);
}

void append_shape(std::string& text, const std::vector<int64_t>& shape) {
  const auto size = static_cast<int64_t>(shape.size());
  append(text, &size, sizeof size);
  append(text, shape.data(), shape.size() * sizeof(int64_t));
}

class PartReader {
 public:
  explicit PartReader(const std::string& text) : text_(text) {}
  bool done() const { return at_ == text_.size(); }
  int64_t number() {
    int64_t value = 0;
    bytes(&value, sizeof value);
    return value;
  }
  std::vector<int64_t> shape() {
    std::vector<int64_t> out(static_cast<size_t>(number()));
    bytes(out.data(), out.size() * sizeof(int64_t));
    return out;
  }
  void bytes(void* out, size_t count) {
    MEGATRON_ASSERT(count <= text_.size() - at_, "a part of a trace is cut short");
    std::memcpy(out, text_.data() + at_, count);
    at_ += count;
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

std::string to_text(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) {
    append_shape(text, std::vector<int64_t>(part.name.begin(), part.name.end()));
    append_shape(text, part.global_shape);
    append_shape(text, part.piece.global.offset);
    append_shape(text, part.piece.global.shape);
    append(text, part.values.const_data_ptr(), part.values.nbytes());
  }
  return text;
}

void add_text(const std::string& text, Assembly& assembly) {
  for (PartReader reader(text); !reader.done();) {
    Part part;
    const std::vector<int64_t> name = reader.shape();
    part.name.assign(name.begin(), name.end());
    part.global_shape = reader.shape();
    part.piece.global.offset = reader.shape();
    part.piece.global.shape = reader.shape();
    part.values = at::empty(part.piece.global.shape, at::kDouble);
    reader.bytes(part.values.data_ptr(), part.values.nbytes());
    assembly.add(part);
  }
}

constexpr const char* kTokens = "weight of the tokens";
constexpr const char* kZeros = "zeros in the gradients";

// One rank of a traced run.
class TracedRun {
 public:
  TracedRun(const PretrainTask& task, const Arguments& arguments, const TraceOptions& options,
            const ParallelGroups& groups, c10::Device device)
      : task_(task),
        arguments_(arguments),
        updates_(options.updates),
        weights_(options.weights),
        gradients_(options.gradients),
        device_(device),
        groups_(groups),
        tokenizer_(make_tokenizer(arguments.tokenizer)),
        vocabulary_(vocabulary_of(arguments, *tokenizer_)),
        datasets_(proof_datasets(build_datasets(task, arguments, *tokenizer_), arguments)),
        model_(
            build_model(task, arguments, vocabulary_, groups, options.dtype, device, StartPoint{})),
        batches_(device, groups.cp, unpadded_row_multiple(arguments),
                 task.addition(model_.chunks.front().module->config())) {
    MEGATRON_CHECK(datasets_.train, "the data has no training split");
    if (options.routing != nullptr) routing_ = *options.routing;
    if (options.routers) routing_.value().log = &router_log_;
    if (!updates_) draw_weights(1);
    if (options.disturbance > 0) disturb_weights(options.disturbance);
    loader_ = make_train_loader(arguments, groups, datasets_.train, /*consumed=*/0, device);
    if (arguments.parallel.hybrid_context_parallel)
      dynamic_context_ =
          std::make_unique<DynamicContextBatches>(arguments, groups, std::move(loader_), device);
  }

  // Runs a step. Appends this rank's parts of the gradients to `parts`; every rank gets the
  // numbers.
  TracedStep step(int index, std::vector<Part>& parts) {
    StepOptions options = step_options(arguments_, consumed_);
    options.routing = routing_ ? &*routing_ : nullptr;
    consumed_ += options.global_batch_size;
    if (dynamic_context_ && !gradients_)
      options.num_microbatches = dynamic_context_->begin_step(options.global_batch_size);
    Timers timers(0);
    const auto next_batch = [this] {
      return dynamic_context_ ? dynamic_context_->next() : batches_.make(loader_->next());
    };
    const at::Tensor totals =
        gradients_ ? gradients_(model_, options, index)
                   : accumulate_gradients(model_, task_, options, next_batch, timers);
    TracedStep step;
    if (!gradients_) add_losses(totals, step.numbers);
    add_gradients(cat("grad ", index, " "), gradients_ ? 1 : 1 / divisor(step, options), parts);
    batches_.take_held();
    add_routers(parts);
    if (!updates_) {
      // As after an update: what is derived from weights (casts, gathered ones) is made anew, and
      // statistics of the step are forgotten.
      draw_weights(index + 2);
      std::vector<Module*> modules;
      for (const ModelChunk& chunk : model_.chunks) {
        chunk.store->trained_values_changed();
        modules.push_back(chunk.module.get());
      }
      end_step(modules, at::ones({}, at::TensorOptions().dtype(at::kLong).device(device_)),
               groups_);
      return step;
    }
    const StepCounts counts = update_weights(model_, options, totals);
    if (arguments_.transformer.has_moe())
      step.numbers["tokens per expert max/mean"] = {Quantity::kLoss, largest_over_mean(counts),
                                                    /*exact=*/true};
    add_step_state(model_.optimizer->read_state(), step.numbers);
    step.numbers[kZeros] = {Quantity::kGradientNorm, model_.optimizer->num_zeros()};
    return step;
  }

  // After the last step: this rank's parts of weights and states; every rank gets the numbers of
  // the evaluations.
  std::map<std::string, TracedNumber> end(std::vector<Part>& parts) {
    const auto add_all = [&](const char* prefix, const std::vector<StateTensor>& tensors) {
      for (const StateTensor& tensor : tensors)
        add(prefix + tensor.description.key, tensor, 1.0, parts);
    };
    for (const ModelChunk& chunk : model_.chunks)
      add_all("state ", chunk.store->delayed_scaling_state());
    if (!updates_) return {};
    for (const ModelChunk& chunk : model_.chunks) {
      chunk.store->finish_param_sync();
      add_all("weight ", chunk.store->state());
      // As the next step would compute with them
      for (Parameter* parameter : chunk.store->parameters()) {
        const AcquiredValue value(parameter);
        const ShardedTensor whole =
            sharded_tensor(*parameter, groups_, parameter->name, value.value());
        add("weight " + parameter->name, {whole, value.value()}, 1.0, parts);
      }
    }
    add_all("state ", model_.optimizer->tensors());
    return gradients_ ? std::map<std::string, TracedNumber>() : evaluate();
  }

 private:
  // Initial ones, but those that a run starts as zeros (biases, halves of adapters, biases of a
  // router's selection) are none: what is multiplied by zeros shows nothing.
  void draw_weights(int64_t seed) {
    constexpr double kOfZeros = 0.05;
    for (const ModelChunk& chunk : model_.chunks) {
      chunk.module->visit_state([&](const std::string& name, at::Tensor& state) {
        normal_(state.view({1, -1}), kOfZeros, random_key(seed, name), /*first_row=*/0,
                /*row_elements=*/state.numel(), /*column_offset=*/0);
      });
      chunk.store->edit_values([&](Parameter& parameter) {
        const Init init = parameter.init;
        if (init.kind == Init::Kind::kZero) parameter.init = Init::normal(kOfZeros);
        initialize_parameter(parameter, seed, groups_);
        parameter.init = init;
        parameter.value.copy_(parameter.value.to(weights_));
      });
    }
  }

  void disturb_weights(double by) {
    for (const ModelChunk& chunk : model_.chunks)
      chunk.store->edit_values([&](Parameter& parameter) {
        const at::Tensor place = at::arange(parameter.value.numel(), parameter.value.options());
        parameter.value.mul_(1 + by * at::sin(place + 1).sign().view_as(parameter.value));
      });
  }

  // Of the routers of all stages.
  double largest_over_mean(const StepCounts& counts) const {
    const at::Tensor most = at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device_));
    if (counts.largest_over_mean.defined())
      most.copy_(counts.largest_over_mean.to(at::kDouble).view({1}));
    groups_.pp.all_reduce(most, ReduceOp::kMax)->wait();
    return most.item<double>();
  }

  std::map<std::string, TracedNumber> evaluate() {
    std::map<std::string, TracedNumber> numbers;
    numbers["norm of the weights"] = {Quantity::kWeights, model_.optimizer->params_norm()};
    if (arguments_.training.eval_iters == 0 && !arguments_.data.full_validation) return numbers;
    const auto add_set = [&](const std::string& set, const std::shared_ptr<const Dataset>& dataset,
                             bool test) {
      Evaluator evaluator(dataset, evaluation_options(arguments_, groups_, test), device_);
      // The second time goes on behind the samples of the first, and begins the set again at its
      // end.
      for (const int time : {1, 2}) {
        const std::optional<Evaluator::Result> result = evaluator.run(task_, model_);
        const std::string name = cat(set, ", evaluation ", time, " ");
        numbers[name + "loss"] = {Quantity::kEvaluation, result->loss};
        for (size_t i = 0; i < task_.metrics.size(); ++i)
          numbers[name + task_.metrics[i]] = {Quantity::kEvaluation, result->metrics[i]};
      }
    };
    for (size_t i = 0; i < datasets_.valid.size(); ++i)
      add_set(cat("validation set ", i + 1), datasets_.valid[i], /*test=*/false);
    if (datasets_.test && arguments_.training.eval_iters > 0)
      add_set("test set", datasets_.test, /*test=*/true);
    return numbers;
  }

  // Of the gradients, that they are those of the mean loss.
  double divisor(const TracedStep& step, const StepOptions& options) const {
    if (!options.per_token_loss)
      return static_cast<double>(options.num_microbatches * options.replicas);
    // As in the step if every token is masked
    const double weight = step.number(kTokens);
    return weight == 0 ? 1 : weight;
  }

  void add_losses(const at::Tensor& totals, std::map<std::string, TracedNumber>& numbers) const {
    const at::Tensor host = totals.cpu();
    const auto at = [&](int64_t i) { return host[i].item<double>(); };
    const double weight = at(1), counted = weight == 0 ? 1 : weight;
    numbers["loss"] = {Quantity::kLoss, at(0) / counted};
    numbers[kTokens] = {Quantity::kLoss, weight, /*exact=*/true};
    const std::vector<std::string> auxiliary = model_.auxiliary_losses();
    int64_t i = 2;
    for (const std::string& name : task_.metrics)
      numbers[name] = {Quantity::kLoss, at(i++) / counted};
    for (const std::string& name : auxiliary) {
      const double own = at(i + 1);
      numbers[name] = {Quantity::kLoss, at(i) / (own == 0 ? 1 : own)};
      i += 2;
    }
    MEGATRON_ASSERT(i == host.numel());
  }

  void add_gradients(const std::string& prefix, double factor, std::vector<Part>& parts) {
    for (const ModelChunk& chunk : model_.chunks) {
      const std::vector<FlatShard>& shards = chunk.store->shards();
      const auto part = [&](size_t shard, const FlatSlot& slot) {
        return shards[shard].grads.narrow(0, slot.begin, slot.num_elements());
      };
      const at::ScalarType type = chunk.store->flat_grads().scalar_type();
      for (const StateTensor& grad : chunk.store->describe(
               prefix,
               [&](const Parameter& p) { return p.trainable ? std::optional(type) : std::nullopt; },
               part))
        add(grad.description.key, grad, factor, parts);
    }
  }

  void add_routers(std::vector<Part>& parts) {
    for (const auto& [place, rows] : router_log_.take()) {
      const auto& [layer, use, sample] = place;
      const std::string prefix = cat("router layer ", layer, " use ", use, " sample ", sample, " ");
      const int64_t length = sample_size(arguments_.transformer).tokens;
      const auto all_positions = [&](const at::Tensor& known) {
        MEGATRON_ASSERT(known.size(0) <= length, "a router has rows behind the sample's end");
        return at::constant_pad_nd(known, {0, 0, 0, length - known.size(0)}, std::nan(""));
      };
      add_whole(prefix + "logits", all_positions(rows.logits), parts);
      add_whole(prefix + "choices", all_positions(rows.choices), parts);
      if (rows.bias.defined()) add_whole(prefix + "bias", rows.bias, parts);
    }
  }

  // A tensor of which every rank may hold any element.
  static void add_whole(const std::string& name, const at::Tensor& values,
                        std::vector<Part>& parts) {
    const std::vector<int64_t> shape = values.sizes().vec(), first(shape.size(), 0);
    parts.push_back({name, shape, {{first, shape}, first}, values.contiguous()});
  }

  static void add_step_state(const StepState& state, std::map<std::string, TracedNumber>& numbers) {
    numbers["gradient norm"] = {Quantity::kGradientNorm, state.grad_norm};
    numbers["clip factor"] = {Quantity::kClipFactor, state.clip_coefficient};
    for_each_field(state, [&](const std::string& name, const auto& value) {
      if (name == "grad_norm" || name == "clip_coefficient" || name == "grad_factor") return;
      numbers[name] = {Quantity::kSchedule, static_cast<double>(value), /*exact=*/true};
    });
  }

  // Adds the pieces of one local tensor. If this rank holds only a range of its flattened elements,
  // the others are NaN.
  void add(const std::string& name, const StateTensor& state, double factor,
           std::vector<Part>& parts) {
    const ShardedTensor& d = state.description;
    at::Tensor whole = state.data.to(at::kCPU, at::kDouble).reshape({-1}) * factor;
    int64_t count = 1;
    for (int64_t size : d.local_shape) count *= size;
    if (whole.numel() != count) {
      const at::Tensor part = whole;
      whole = at::full({count}, std::nan(""), at::kDouble);
      if (part.numel() > 0) whole.narrow(0, d.flat_begin, part.numel()).copy_(part);
    }
    whole = whole.view(d.local_shape);
    if (d.pieces.empty()) add_whole(name, whole, parts);  // every rank holds all of it
    for (const ShardPiece& piece : d.pieces) {
      at::Tensor values = whole;
      for (size_t dim = 0; dim < piece.local_offset.size(); ++dim)
        values = values.narrow(static_cast<int64_t>(dim), piece.local_offset[dim],
                               piece.global.shape[dim]);
      parts.push_back({name, d.global_shape, piece, values.contiguous()});
    }
  }

  const PretrainTask& task_;
  const Arguments& arguments_;
  const bool updates_;
  const at::ScalarType weights_;
  const std::function<at::Tensor(TrainedModel&, const StepOptions&, int)> gradients_;
  std::optional<RoutingReplay> routing_;
  RouterLog router_log_;
  const c10::Device device_;
  const ParallelGroups& groups_;
  std::unique_ptr<Tokenizer> tokenizer_;
  const Vocabulary vocabulary_;
  TrainValidTestDatasets datasets_;
  TrainedModel model_;
  BatchMaker batches_;
  std::unique_ptr<DataLoader> loader_;
  std::unique_ptr<DynamicContextBatches> dynamic_context_;  // in place of loader_ and batches_
  int64_t consumed_ = 0;
};

// Numbers of a step as parts, so that those of different ranks are compared.
void add_numbers(const std::string& prefix, const std::map<std::string, TracedNumber>& numbers,
                 std::vector<Part>& parts) {
  // Not-a-number would say that this rank does not hold it.
  for (const auto& [name, number] : numbers) {
    const double value = std::isnan(number.value) ? -HUGE_VAL : number.value;
    parts.push_back({prefix + name, {1}, {{{0}, {1}}, {0}}, at::full({1}, value, at::kDouble)});
  }
}

// Runs the steps of one rank and what follows them. `collect` takes this rank's parts step by step,
// because the store takes messages of a few megabytes. Returns the numbers alone.
TrainingTrace run_steps(TracedRun& run, int num_steps,
                        const std::function<void(const std::vector<Part>&)>& collect) {
  TrainingTrace trace;
  for (int i = 0; i < num_steps; ++i) {
    std::vector<Part> parts;
    trace.steps.push_back(run.step(i, parts));
    add_numbers(cat("number ", i, " "), trace.steps.back().numbers, parts);
    collect(parts);
  }
  std::vector<Part> parts;
  trace.evaluation = run.end(parts);
  add_numbers("number end ", trace.evaluation, parts);
  collect(parts);
  return trace;
}

// Adds to one rank's numbers what the parts of all ranks make up.
TrainingTrace assemble(TrainingTrace trace, Assembly& assembly) {
  assembly.take("number end ", trace.faults);
  for (size_t i = 0; i < trace.steps.size(); ++i) {
    assembly.take(cat("number ", i, " "), trace.faults);
    trace.steps[i].grads = assembly.take(cat("grad ", i, " "), trace.faults);
  }
  trace.weights = assembly.take("weight ", trace.faults);
  trace.states = assembly.take("state ", trace.faults);
  // Rows of padding may be computed nowhere.
  trace.routers = assembly.take("router ", trace.faults, /*whole=*/false);
  return trace;
}

double length_of(const at::Tensor& x) { return at::linalg_vector_norm(x, 2).item<double>(); }

// Elements that are zero in one of the two: gradients that are zero in exact arithmetic need not be
// in floating-point arithmetic.
double zeros_of_one(const LogicalTensors& a, const LogicalTensors& b) {
  double count = 0;
  for (const auto& [name, tensor] : b)
    if (const auto found = a.find(name);
        found != a.end() && found->second.sizes() == tensor.sizes())
      count += (found->second == 0).ne(tensor == 0).sum().item<double>();
  return count;
}

// "optimizer.state.exp_avg" of "optimizer.state.exp_avg.decoder...", "fp8" of "fp8.decoder..."
std::string kind_of_state(const std::string& name) {
  const size_t begin = name.starts_with("optimizer.state.") ? std::strlen("optimizer.state.") : 0;
  return name.substr(0, name.find('.', begin));
}

class Comparer {
 public:
  explicit Comparer(double rtol) : rtol_(rtol) {}
  void begin_step(int step) {
    step_ = step;
    prefix_ = step > 0 ? cat("step ", step, " ") : "";
  }
  void numbers(const std::map<std::string, TracedNumber>& a,
               const std::map<std::string, TracedNumber>& b, double zeros = 0) {
    // Metrics may be differences of larger numbers: the largest of a kind bounds them all.
    double largest[kNumQuantities] = {};
    const auto scale = [&](const TracedNumber& number) -> double& {
      return largest[static_cast<size_t>(number.quantity)];
    };
    for (const auto& [name, number] : b)
      if (!number.exact && name != kZeros && std::isfinite(number.value))
        scale(number) = std::max(scale(number), std::abs(number.value));
    for (const auto& [name, number] : b) {
      const auto found = a.find(name);
      const double value = found == a.end() ? std::nan("") : found->second.value;
      // Infinities, and not-a-numbers of a skipped step, have no difference.
      const bool same = value == number.value ||
                        (found != a.end() && std::isnan(value) && std::isnan(number.value));
      add(number.quantity, name, same ? 0 : std::abs(value - number.value),
          number.exact     ? 0
          : name == kZeros ? zeros
                           : rtol_ * scale(number));
    }
  }
  // Those of one kind: their norm together bounds the difference of each.
  void tensors(Quantity quantity, const std::string& noun, const LogicalTensors& a,
               const LogicalTensors& b,
               const std::function<std::string(const std::string&)>& kind_of = {}) {
    const auto kind = [&](const std::string& name) { return kind_of ? kind_of(name) : ""; };
    std::map<std::string, double> all;
    for (const auto& [name, tensor] : b)
      all[kind(name)] = std::hypot(all[kind(name)], length_of(tensor));
    for (const auto& [name, tensor] : b) {
      const auto found = a.find(name);
      if (found == a.end() || found->second.sizes() != tensor.sizes()) {
        add(quantity, cat(noun, name, " is missing"), 1, 0);
        continue;
      }
      const bool same = at::equal(found->second, tensor);
      add(quantity, noun + name, same ? 0 : length_of(found->second - tensor),
          rtol_ == 0 ? 0 : rtol_ * length_of(tensor) + 1e-3 * rtol_ * all[kind(name)]);
    }
    for (const auto& [name, tensor] : a)
      if (!b.contains(name)) add(quantity, cat("serial ", noun, name, " is missing"), 1, 0);
  }
  std::vector<Comparison> take() { return std::move(out_); }

 private:
  void add(Quantity quantity, const std::string& name, double difference, double allowed) {
    out_.push_back({quantity, step_, prefix_ + name, difference, allowed});
  }
  const double rtol_;
  int step_ = 0;
  std::string prefix_;
  std::vector<Comparison> out_;
};

}  // namespace

TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             const TraceOptions& options) {
  Assembly assembly;
  TrainingTrace trace;
  run_ranks(
      static_cast<int>(arguments.world_size),
      [&](const std::shared_ptr<Backend>& world) {
        const ParallelGroups groups =
            make_parallel_groups(arguments.parallel, arguments.encoder_ranks(), world);
        TracedRun run(task, arguments, options, groups, at::kCPU);
        TrainingTrace own = run_steps(run, options.num_steps, [&](const std::vector<Part>& parts) {
          for (const Part& part : parts) assembly.add(part);
        });
        if (world->rank() == 0) trace = std::move(own);
      },
      /*timeout_seconds=*/120);
  return assemble(std::move(trace), assembly);
}

TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             const TraceOptions& options, const Job& job, c10::Device device) {
  Assembly assembly;
  TracedRun run(task, arguments, options, job.groups, device);
  TrainingTrace trace = run_steps(run, options.num_steps, [&](const std::vector<Part>& parts) {
    if (job.agreement == nullptr) {
      for (const Part& part : parts) assembly.add(part);
    } else {
      for (const std::string& text : job.agreement->gather(to_text(parts)))
        add_text(text, assembly);
    }
  });
  // A rank that exits frees memory that peers may still be reading
  job.groups.world.barrier();
  if (job.agreement != nullptr && !job.is_first()) return {};
  return assemble(std::move(trace), assembly);
}

const char* name_of(Quantity quantity) {
  constexpr const char* kNames[kNumQuantities] = {"routing",         "loss",        "gradients",
                                                  "gradient norm",   "clip factor", "schedule",
                                                  "updated weights", "states",      "evaluation"};
  return kNames[static_cast<size_t>(quantity)];
}

std::vector<Comparison> compare_traces(const TrainingTrace& trace, const TrainingTrace& reference,
                                       double rtol) {
  MEGATRON_ASSERT(trace.steps.size() == reference.steps.size());
  Comparer comparer(rtol);
  for (size_t i = 0; i < trace.steps.size(); ++i) {
    comparer.begin_step(static_cast<int>(i) + 1);
    comparer.numbers(trace.steps[i].numbers, reference.steps[i].numbers,
                     zeros_of_one(trace.steps[i].grads, reference.steps[i].grads));
    comparer.tensors(Quantity::kGradients, "gradient of ", trace.steps[i].grads,
                     reference.steps[i].grads);
  }
  comparer.begin_step(0);
  comparer.tensors(Quantity::kWeights, "updated ", trace.weights, reference.weights);
  comparer.tensors(Quantity::kStates, "", trace.states, reference.states, kind_of_state);
  comparer.numbers(trace.evaluation, reference.evaluation);
  return comparer.take();
}

std::vector<GrownRounding> allow_grown_rounding(std::vector<Comparison>& comparisons,
                                                const TrainingTrace& disturbed,
                                                const TrainingTrace& reference, double rtol) {
  // Of the rounding of all operations to that of the weights alone: up to 8 was measured.
  constexpr double kOfAllOperations = 30;
  std::map<int, double> factors;
  for (const Comparison& c : compare_traces(disturbed, reference, rtol))
    if (c.allowed > 0)
      factors[c.step] = std::max(factors[c.step], kOfAllOperations * c.difference / c.allowed);
  for (Comparison& c : comparisons) c.allowed *= std::max(1.0, factors[c.step]);
  std::vector<GrownRounding> grown;
  for (const auto& [step, factor] : factors)
    if (factor > 1) grown.push_back({step, factor * rtol});
  return grown;
}

}  // namespace megatron
