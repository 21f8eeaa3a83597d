#include "megatron/training/proving/equivalence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/dynamic_context/dynamic_context_batches.h"

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

  LogicalTensors take(const std::string& prefix, std::vector<std::string>& faults) {
    LogicalTensors out;
    for (auto& [name, entry] : entries_) {
      if (!name.starts_with(prefix)) continue;
      const std::string parameter = name.substr(prefix.size());
      if (!entry.held.all().item<bool>())
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

// One rank of a traced run.
class TracedRun {
 public:
  TracedRun(const PretrainTask& task, const Arguments& arguments, at::ScalarType dtype,
            const ParallelGroups& groups, c10::Device device)
      : task_(task),
        arguments_(arguments),
        device_(device),
        groups_(groups),
        tokenizer_(make_tokenizer(arguments.tokenizer)),
        vocabulary_(vocabulary_of(arguments, *tokenizer_)),
        datasets_(build_datasets(task, arguments, *tokenizer_)),
        model_(build_model(task, arguments, vocabulary_, groups, dtype, device, StartPoint{})),
        batches_(device, groups.cp) {
    MEGATRON_CHECK(datasets_.train, "the data has no training split");
    loader_ = make_train_loader(arguments, groups, datasets_.train, /*consumed=*/0, device);
    if (arguments.parallel.hybrid_context_parallel)
      dynamic_context_ =
          std::make_unique<DynamicContextBatches>(arguments, groups, std::move(loader_), device);
  }

  // Runs a step. Appends this rank's parts to `parts`; every rank gets the numbers.
  TracedStep step(int index, std::vector<Part>& parts) {
    StepOptions options = step_options(arguments_, consumed_);
    consumed_ += options.global_batch_size;
    if (dynamic_context_)
      options.num_microbatches = dynamic_context_->begin_step(options.global_batch_size);
    Timers timers(0);
    const at::Tensor totals = accumulate_gradients(
        model_, task_, options,
        [this] {
          return dynamic_context_ ? dynamic_context_->next() : batches_.make(loader_->next());
        },
        timers);
    TracedStep step;
    step.weight = totals[1].item<double>();
    // As in the step if every token is masked
    const double counted = step.weight == 0 ? 1 : step.weight;
    step.loss = totals[0].item<double>() / counted;
    const std::vector<std::string> names = model_.auxiliary_losses();
    const int64_t first = totals.numel() - 2 * static_cast<int64_t>(names.size());
    for (size_t i = 0; i < names.size(); ++i) {
      const at::Tensor pair = totals.narrow(0, first + 2 * static_cast<int64_t>(i), 2);
      step.auxiliary[names[i]] = (pair[0] / pair[1]).item<double>();
    }
    const double divisor =
        options.per_token_loss ? counted : double(options.num_microbatches * groups_.dp.size());
    for (const ModelChunk& chunk : model_.chunks) {
      const std::vector<FlatShard>& shards = chunk.store->shards();
      const auto part = [&](size_t shard, const FlatSlot& slot) {
        return shards[shard].grads.narrow(0, slot.begin, slot.num_elements());
      };
      const at::ScalarType type = chunk.store->flat_grads().scalar_type();
      for (const StateTensor& grad : chunk.store->describe(
               cat("grad ", index, " "), type, [](const Parameter& p) { return p.trainable; },
               part))
        add(grad.description.key, grad, 1 / divisor, parts);
    }
    update_weights(model_, options, totals);
    const StepState state = model_.optimizer->read_state();
    step.grad_norm = state.grad_norm;
    const double clip = arguments_.optimizer.clip_grad;
    step.clip_factor = clip > 0 ? std::min(1.0, clip / (state.grad_norm + 1e-6)) : 1.0;
    batches_.take_held();
    return step;
  }

  void weights(std::vector<Part>& parts) {
    for (const ModelChunk& chunk : model_.chunks) {
      chunk.store->finish_param_sync();
      for (const StateTensor& value : chunk.store->state())
        add("weight " + value.description.key, value, 1.0, parts);
    }
  }

 private:
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

TrainingTrace assemble(std::vector<TracedStep> steps, Assembly& assembly) {
  TrainingTrace trace;
  for (size_t i = 0; i < steps.size(); ++i) {
    trace.steps.push_back(std::move(steps[i]));
    trace.steps.back().grads = assembly.take(cat("grad ", i, " "), trace.faults);
  }
  trace.weights = assembly.take("weight ", trace.faults);
  return trace;
}

double length_of(const at::Tensor& x) { return at::linalg_vector_norm(x, 2).item<double>(); }

}  // namespace

TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             at::ScalarType dtype, int num_steps) {
  Assembly assembly;
  std::vector<TracedStep> steps(num_steps);
  run_ranks(
      static_cast<int>(arguments.world_size),
      [&](const std::shared_ptr<Backend>& world) {
        const ParallelGroups groups = make_parallel_groups(arguments.parallel, world);
        TracedRun run(task, arguments, dtype, groups, at::kCPU);
        std::vector<Part> parts;
        for (int i = 0; i < num_steps; ++i) {
          const TracedStep step = run.step(i, parts);
          if (world->rank() == 0) steps[i] = step;
        }
        run.weights(parts);
        for (const Part& part : parts) assembly.add(part);
      },
      /*timeout_seconds=*/120);
  return assemble(std::move(steps), assembly);
}

TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             at::ScalarType dtype, int num_steps, const Job& job,
                             c10::Device device) {
  Assembly assembly;
  std::vector<TracedStep> steps;
  std::vector<Part> parts;
  TracedRun run(task, arguments, dtype, job.groups, device);
  for (int i = 0; i < num_steps; ++i) steps.push_back(run.step(i, parts));
  run.weights(parts);
  // A rank that exits frees memory that peers may still be reading
  job.groups.world.barrier();
  if (job.agreement == nullptr) {
    for (const Part& part : parts) assembly.add(part);
  } else {
    for (const std::string& text : job.agreement->gather(to_text(parts))) add_text(text, assembly);
    if (!job.is_first()) return {};
  }
  return assemble(std::move(steps), assembly);
}

std::vector<Comparison> compare_traces(const TrainingTrace& trace, const TrainingTrace& reference,
                                       double rtol) {
  MEGATRON_ASSERT(trace.steps.size() == reference.steps.size());
  std::vector<Comparison> out;
  const auto number = [&](const std::string& name, double a, double b) {
    out.push_back({name, std::abs(a - b), rtol * std::abs(b)});
  };
  const auto missing = [&](const std::string& name) {
    out.push_back({name + " is missing", 1, 0});
  };
  for (size_t i = 0; i < trace.steps.size(); ++i) {
    const TracedStep& a = trace.steps[i];
    const TracedStep& b = reference.steps[i];
    const std::string step = cat("step ", i + 1, " ");
    number(step + "loss", a.loss, b.loss);
    out.push_back({step + "weight of the tokens", std::abs(a.weight - b.weight), 0});
    for (const auto& [name, loss] : b.auxiliary)
      number(step + name, a.auxiliary.contains(name) ? a.auxiliary.at(name) : std::nan(""), loss);
    number(step + "gradient norm", a.grad_norm, b.grad_norm);
    number(step + "clip factor", a.clip_factor, b.clip_factor);
    double all = 0;
    for (const auto& [name, grad] : b.grads) all = std::hypot(all, length_of(grad));
    for (const auto& [name, grad] : b.grads) {
      const auto found = a.grads.find(name);
      if (found == a.grads.end() || found->second.sizes() != grad.sizes()) {
        missing(cat(step, "gradient of ", name));
        continue;
      }
      out.push_back({cat(step, "gradient of ", name), length_of(found->second - grad),
                     rtol * length_of(grad) + 1e-3 * rtol * all});
    }
    for (const auto& [name, grad] : a.grads)
      if (!b.grads.contains(name)) missing(cat("serial ", step, "gradient of ", name));
  }
  double all = 0;
  for (const auto& [name, weight] : reference.weights) all = std::hypot(all, length_of(weight));
  for (const auto& [name, weight] : reference.weights) {
    const auto found = trace.weights.find(name);
    if (found == trace.weights.end() || found->second.sizes() != weight.sizes()) {
      missing(cat("updated ", name));
      continue;
    }
    out.push_back({cat("updated ", name), length_of(found->second - weight),
                   rtol * length_of(weight) + 1e-3 * rtol * all});
  }
  return out;
}

}  // namespace megatron
