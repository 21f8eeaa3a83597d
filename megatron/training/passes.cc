#include "megatron/training/passes.h"

#include <optional>

#include "megatron/base/check.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/nn/recompute.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/lora_adapter.h"

namespace megatron {

namespace {

// What the forward of one micro-batch through one chunk keeps until its backward.
struct Pass {
  OffloadedPass offload;
  RecomputeTape tape;
  BackwardEnd input;  // receives the gradient for the previous segment
  BackwardRoot root;
  at::Tensor root_grad;  // on the last segment
  std::vector<std::function<void()>> weight_gradients;
};

ForwardContext context_of(const Batch& batch, bool training) {
  ForwardContext context;
  context.training = training;
  context.place = batch.place;
  context.position_ids = batch.find("position_ids");
  context.document_ids = batch.document_ids;
  context.cp = batch.cp;
  return context;
}

class StagePasses final : public StageCompute {
 public:
  StagePasses(TrainedModel& model, const PretrainTask& task, const PassOptions& options,
              const std::function<Batch()>& next_batch, Timers& timers)
      : model_(model),
        task_(task),
        options_(options),
        next_batch_(next_batch),
        timers_(timers),
        batches_(options.num_microbatches),
        passes_(model.chunks.size()),
        vocabulary_(options.num_microbatches),
        totals_(at::zeros({2 + static_cast<int64_t>(task.metrics.size())},
                          at::TensorOptions().dtype(at::kDouble).device(model.device()))) {
    for (std::vector<Pass>& passes : passes_) passes.resize(options.num_microbatches);
  }

  at::Tensor forward(int chunk, int microbatch, const at::Tensor& input) override {
    const Batch& batch = batch_of(microbatch);
    Pass& pass = passes_[chunk][microbatch];
    ForwardContext context = context_of(batch, options_.training);
    if (options_.training) {
      context.tape = &pass.tape;
      if (options_.per_token_loss) context.loss_grad = options_.loss_scale;
      if (model_.offload) pass.offload = OffloadedPass(*model_.offload);
      if (model_.offload) context.offload = &pass.offload;
    }
    at::Tensor start = input;
    if (input.defined() && options_.training) {
      start = input.detach();
      pass.input = BackwardEnd(start);
    }
    const Region region(timers_, "forward-compute", 2, Section::kForward);
    StageOutput output = task_.forward_step(*model_.chunks[chunk].module, batch, start, context);
    const bool last_use = --uses_left_[microbatch] == 0;
    if (output.loss.sum.defined()) {
      add_totals(output);
      if (options_.training) start_backward(output.loss, options_.loss_scale, pass);
    } else if (options_.training) {
      pass.root = BackwardRoot(output.activation);
    }
    if (last_use) drop_batch(microbatch);
    return output.activation.defined() ? output.activation.detach() : at::Tensor();
  }

  at::Tensor backward(int chunk, int microbatch, const at::Tensor& grad_output,
                      bool defer_weights) override {
    DistributedDataParallel& store = *model_.chunks[chunk].store;
    Pass& pass = passes_[chunk][microbatch];
    const Region region(timers_, "backward-compute", 2, Section::kBackward);
    if (defer_weights) store.defer_weight_gradients_to(&pass.weight_gradients);
    pass.offload.begin_backward();
    pass.tape.backward(std::move(pass.root),
                       pass.root_grad.defined() ? pass.root_grad : grad_output);
    store.defer_weight_gradients_to(nullptr);
    at::Tensor grad = pass.input.defined() ? pass.input.take_grad() : at::Tensor();
    MEGATRON_ASSERT(!pass.input.defined() || grad.defined(),
                    "the backward of a stage did not reach its input");
    std::vector<std::function<void()>> weight_gradients = std::move(pass.weight_gradients);
    pass = Pass();
    pass.weight_gradients = std::move(weight_gradients);
    return grad;
  }

  at::Tensor head(int microbatch, const at::Tensor& hidden) override {
    const Region region(timers_, "forward-compute", 2, Section::kForward);
    vocabulary_[microbatch] =
        task_.begin_loss(*model_.chunks[0].module, batch_of(microbatch), hidden);
    if (--uses_left_[microbatch] == 0) drop_batch(microbatch);
    return vocabulary_[microbatch]->statistics();
  }

  at::Tensor loss(int microbatch, const at::Tensor& statistics) override {
    const Region region(timers_, "backward-compute", 2, Section::kBackward);
    const std::unique_ptr<VocabularyPass> pass = std::move(vocabulary_[microbatch]);
    const Loss loss = pass->loss(statistics);
    // The loss is the same on every stage; count it once
    if (model_.pipeline->slice(0).head) totals_.narrow(0, 0, 2) += pair_of(loss);
    return options_.training ? pass->backward(factor_of(loss, options_.loss_scale)) : at::Tensor();
  }

  void weight_backward(int chunk, int microbatch) override {
    const Region region(timers_, "backward-compute", 2, Section::kBackward);
    std::vector<std::function<void()>>& todo = passes_[chunk][microbatch].weight_gradients;
    for (std::function<void()>& compute : todo) {
      compute();
      compute = {};
    }
    todo.clear();
  }

  // Note [Kernels are loaded before pipelines run] CUDA loads a kernel at its first launch and may
  // synchronise the whole device then. A receive that was posted early is a kernel that waits for
  // the peer, which may wait for what this rank has yet to compute: the first step would deadlock.
  // So every chunk first runs on its own, forward only and with its backward; the gradients are
  // dropped. The same holds for collectives over all stages: NCCL sets up an algorithm at its first
  // use, and allocates device memory for it. On CPUs it is not necessary, but done as well, so that
  // this code is tested there.
  void warm_up(int64_t hidden_rows, int64_t hidden_size, at::ScalarType dtype) {
    const Batch& batch = batch_of(0);
    const auto run_chunks =
        [&](const std::function<void(ModelChunk&, const at::Tensor& input)>& run) {
          for (size_t i = 0; i < model_.chunks.size(); ++i) {
            at::Tensor input;
            if (!model_.pipeline->slice(static_cast<int>(i)).embedding)
              input = at::zeros({hidden_rows, batch.place.sample.size(0), hidden_size},
                                at::TensorOptions().dtype(dtype).device(model_.device()));
            run(model_.chunks[i], input);
          }
        };
    run_chunks([&](ModelChunk& chunk, const at::Tensor& input) {
      const at::NoGradGuard no_grad;
      const StageOutput output =
          task_.forward_step(*chunk.module, batch, input, context_of(batch, /*training=*/false));
      if (!options_.training && model_.pipeline->splits_vocabulary())
        warm_up_vocabulary(chunk, batch, output);
    });
    if (options_.training) {
      // The first pass overwrites gradients, the second one accumulates, with other kernels
      constexpr int kPasses = 2;
      for (ModelChunk& chunk : model_.chunks) chunk.store->zero_grad(kPasses);
      for (int pass = 0; pass < kPasses; ++pass) {
        run_chunks([&](ModelChunk& chunk, const at::Tensor& input) {
          RecomputeTape tape;
          ForwardContext context = context_of(batch, /*training=*/true);
          context.tape = &tape;
          if (options_.per_token_loss) context.loss_grad = options_.loss_scale;
          if (input.defined()) input.set_requires_grad(true);
          const StageOutput output = task_.forward_step(*chunk.module, batch, input, context);
          const at::Tensor& root = output.loss.sum.defined() ? output.loss.sum : output.activation;
          tape.backward(root, at::ones_like(root));
          if (model_.pipeline->splits_vocabulary()) warm_up_vocabulary(chunk, batch, output);
        });
      }
      for (ModelChunk& chunk : model_.chunks) chunk.store->finish_grad_sync();
      for (ModelChunk& chunk : model_.chunks) chunk.store->zero_grad(options_.num_microbatches);
      // Casting quantised weights records their amax, which the step itself must do.
      for (ModelChunk& chunk : model_.chunks) chunk.store->forget_what_is_kept();
    }
    synchronize(model_.device());
  }

  at::Tensor totals() const { return totals_; }
  // Micro-batches are read in order, when a chunk first asks for one.
  const Batch& batch_of(int microbatch) {
    for (; loaded_ <= microbatch; ++loaded_) {
      const Region part(timers_, "batch-generator", 2, Section::kData);
      batches_[loaded_] = next_batch_();
      uses_left_.push_back(static_cast<int>(model_.chunks.size()) +
                           (model_.pipeline->splits_vocabulary() ? 1 : 0));
    }
    return batches_[microbatch];
  }

  // Runs all micro-batches of a step through the whole model, which is one segment, as CUDA graphs
  // if the store allows it.
  void run_graphs(MicrobatchGraphs& graphs) {
    DistributedDataParallel& store = *model_.chunks.front().store;
    for (int i = 0; i < options_.num_microbatches; ++i) {
      const bool first = i == 0, last = i + 1 == options_.num_microbatches;
      if ((first && store.gathers_under_first_pass()) ||
          (last && store.reduces_under_last_pass())) {
        forward(0, i, {});
        backward(0, i, {}, /*defer_weights=*/false);
        continue;
      }
      const Batch& batch = batch_of(i);
      const SectionScope section(timers_.sections(), Section::kForward);  // includes the backward
      if (timers_.sections() != nullptr) timers_.sections()->set_muted(true);
      totals_.narrow(0, 0, 2) += graphs.run(
          batch, options_.loss_scale, first, store,
          [this](const Batch& part, const at::Tensor& scale) { return whole_pass(part, scale); });
      if (timers_.sections() != nullptr) timers_.sections()->set_muted(false);
      batches_[i] = {};
    }
  }

 private:
  void warm_up_vocabulary(ModelChunk& chunk, const Batch& batch, const StageOutput& output) {
    const at::Tensor hidden = at::zeros(output.activation.sizes(), output.activation.options());
    const std::unique_ptr<VocabularyPass> pass = task_.begin_loss(*chunk.module, batch, hidden);
    const Loss loss = pass->loss(model_.pipeline->links().exchange(hidden, pass->statistics()));
    at::zeros_like(totals_).narrow(0, 0, 2) += pair_of(loss);
    if (options_.training) pass->backward(factor_of(loss, options_.loss_scale));
  }

  // Forward and backward of the whole model; returns the loss as pair_of().
  at::Tensor whole_pass(const Batch& batch, const at::Tensor& loss_scale) {
    Pass pass;
    ForwardContext context = context_of(batch, options_.training);
    context.tape = &pass.tape;
    if (options_.per_token_loss) context.loss_grad = loss_scale;
    const StageOutput output =
        task_.forward_step(*model_.chunks.front().module, batch, {}, context);
    start_backward(output.loss, loss_scale, pass);
    pass.tape.backward(std::move(pass.root), pass.root_grad);
    return pair_of(output.loss);
  }

  void add_totals(const StageOutput& output) {
    totals_.narrow(0, 0, 2) += pair_of(output.loss);
    if (output.metrics.defined()) totals_.narrow(0, 2, output.metrics.numel()).add_(output.metrics);
  }

  // [2] fp64: sum and weight.
  static at::Tensor pair_of(const Loss& loss) {
    return at::stack({loss.sum.detach().to(at::kDouble), loss.weight.detach().to(at::kDouble)});
  }

  // Root of the backward: the loss sum times the scale; for the mean of means divided by the
  // micro-batch's own weight, which is that of its whole sequences.
  void start_backward(const Loss& loss, const at::Tensor& loss_scale, Pass& pass) {
    pass.root_grad = factor_of(loss, loss_scale);
    pass.root = BackwardRoot(loss.sum);
  }

  at::Tensor factor_of(const Loss& loss, const at::Tensor& loss_scale) {
    at::Tensor factor = loss_scale.to(loss.sum.scalar_type());
    if (!options_.per_token_loss) {
      const at::Tensor weight = loss.weight.detach().to(factor.scalar_type()).reshape({1}).clone();
      model_.groups().cp.all_reduce(weight)->wait();
      factor = factor / at::clamp_min(weight, 1).reshape({});
    }
    return factor;
  }

  // Keeps the positions, which determine the shape of gradients.
  void drop_batch(int microbatch) {
    Batch kept;
    kept.place = batches_[microbatch].place;
    batches_[microbatch] = std::move(kept);
  }

  TrainedModel& model_;
  const PretrainTask& task_;
  const PassOptions& options_;
  const std::function<Batch()>& next_batch_;
  Timers& timers_;
  std::vector<Batch> batches_;
  std::vector<int> uses_left_;  // by micro-batch: remaining passes that read it
  int loaded_ = 0;
  std::vector<std::vector<Pass>> passes_;                    // by chunk and micro-batch
  std::vector<std::unique_ptr<VocabularyPass>> vocabulary_;  // by micro-batch
  at::Tensor totals_;
};

// Forward passes through the reference model.
class ReferencePasses final : public StageCompute {
 public:
  ReferencePasses(std::vector<ModelChunk>& chunks, const PretrainTask& task,
                  std::vector<Batch>& batches)
      : chunks_(chunks), task_(task), batches_(batches) {}

  at::Tensor forward(int chunk, int microbatch, const at::Tensor& input) override {
    Batch& batch = batches_[microbatch];
    const StageOutput output = task_.reference_step(*chunks_[chunk].module, batch, input,
                                                    context_of(batch, /*training=*/false));
    if (!output.loss.sum.defined()) return output.activation;
    batch.reference = output.loss.sum;
    return {};
  }
  at::Tensor backward(int, int, const at::Tensor&, bool) override {
    throw_error("a reference model has no backward");
  }
  void weight_backward(int, int) override {}

 private:
  std::vector<ModelChunk>& chunks_;
  const PretrainTask& task_;
  std::vector<Batch>& batches_;
};

// Fills Batch::reference on the last stage.
void run_reference(TrainedModel& model, const PretrainTask& task, std::vector<Batch>& batches,
                   Timers& timers) {
  const Region region(timers, "reference-forward", 1, Section::kForward);
  const at::NoGradGuard no_grad;
  std::optional<AdaptersOff> off;
  if (model.reference.empty()) off.emplace();
  ReferencePasses passes(model.reference.empty() ? model.chunks : model.reference, task, batches);
  model.pipeline->run(static_cast<int>(batches.size()), /*training=*/false, passes,
                      [&](int microbatch) { return batches[microbatch].place; });
}

}  // namespace

at::Tensor run_passes(TrainedModel& model, const PretrainTask& task, const PassOptions& options,
                      const std::function<Batch()>& next_batch, Timers& timers) {
  const c10::AutoGradMode grad_mode(options.training);
  std::vector<Batch> read;  // filled for a task with a reference model
  if (task.reference_step) {
    const SectionScope section(timers.sections(), Section::kData);
    for (int i = 0; i < options.num_microbatches; ++i) read.push_back(next_batch());
  }
  size_t taken = 0;
  const std::function<Batch()> take = [&] { return read[taken++]; };
  const std::function<Batch()>& source = task.reference_step ? take : next_batch;
  std::optional<StagePasses> passes(std::in_place, model, task, options, source, timers);
  if (model.pipeline->take_warm_up(options.training)) {
    if (task.reference_step) read[0].reference = at::zeros_like(read[0].place.sample, at::kFloat);
    const auto [rows, hidden_size] = model.pipeline->activation_shape(passes->batch_of(0).place);
    passes->warm_up(rows, hidden_size, model.pipeline->activation_dtype());
  }
  if (task.reference_step) {
    run_reference(model, task, read, timers);
    taken = 0;
    passes.emplace(model, task, options, source, timers);
  }
  if (options.training && model.graphs && model.graphs->begin_step()) {
    passes->run_graphs(*model.graphs);
  } else {
    model.pipeline->run(options.num_microbatches, options.training, *passes,
                        [&](int microbatch) { return passes->batch_of(microbatch).place; });
  }
  const at::Tensor totals = passes->totals();
  model.groups().dp_cp.all_reduce(totals)->wait();
  model.groups().pp.all_reduce(totals)->wait();  // zero on the other stages
  return totals;
}

}  // namespace megatron
