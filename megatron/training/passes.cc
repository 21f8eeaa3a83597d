#include "megatron/training/passes.h"

#include <algorithm>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/nn/recompute.h"
#include "megatron/runtime/device.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/lora_adapter.h"
#include "megatron/transformer/layer/auxiliary_losses.h"

namespace megatron {

namespace {

// What the forward of one micro-batch through one chunk keeps until its backward.
struct Pass {
  OffloadedPass offload;
  RecomputeTape tape;
  std::optional<AuxiliaryLosses> auxiliary_losses;
  std::vector<BackwardEnd> inputs;  // receive the gradients for the previous segment
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
  context.document_rows = batch.document_rows;
  context.tokens.padding = batch.padding;
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
        formats_(options.num_microbatches),
        passes_(model.chunks.size()),
        vocabulary_(options.num_microbatches),
        auxiliary_(options.training ? model.auxiliary_losses() : std::vector<std::string>()),
        num_metrics_(static_cast<int64_t>(task.metrics.size())),
        totals_(at::zeros({2 + num_metrics_ + 2 * num_auxiliary()},
                          at::TensorOptions().dtype(at::kDouble).device(model.device()))),
        own_factors_(at::ones({static_cast<int64_t>(task.own_weights.size())}, totals_.options())) {
    for (std::vector<Pass>& passes : passes_) passes.resize(options.num_microbatches);
    for (const ModelChunk& chunk : model.chunks) {
      if (!task.ahead) break;
      ahead_.push_back(task.ahead(*chunk.module));
      microbatches_ahead_ = std::max(microbatches_ahead_, ahead_.back().microbatches);
    }
  }

  TensorFormats format(int chunk, Border border, int microbatch) override {
    batch_of(microbatch);
    return formats_[microbatch].at(place_of(chunk, border));
  }

  StageTensors forward(int chunk, int microbatch, const StageTensors& input) override {
    const Batch& batch = batch_of(microbatch);
    Pass& pass = passes_[chunk][microbatch];
    ForwardContext context = context_of(batch, options_.training);
    context.routing = options_.routing;
    at::Tensor auxiliary;  // of this pass: sums in the order of whole_pass()
    if (options_.training) {
      context.tape = &pass.tape;
      if (options_.per_token_loss) context.loss_grad = options_.loss_scale;
      if (num_auxiliary() > 0) {
        auxiliary = at::zeros_like(auxiliary_totals());
        take_auxiliary(context, batch, pass, auxiliary, options_.loss_scale, own_factors_);
      }
      if (model_.offload) pass.offload = OffloadedPass(*model_.offload);
      if (model_.offload) context.offload = &pass.offload;
    }
    const StageTensors start =
        options_.training ? start_of(input, chunk, microbatch, pass.inputs) : input;
    const Region region(timers_, "forward-compute", 2, Section::kForward);
    StageOutput output = task_.forward_step(*model_.chunks[chunk].module, batch, start, context);
    if (auxiliary.defined()) auxiliary_totals() += auxiliary;
    const bool last_use = --uses_left_[microbatch] == 0;
    if (output.loss.sum.defined()) {
      add_totals(output);
      if (options_.training) start_backward(output.loss, options_.loss_scale, pass);
    } else if (options_.training) {
      pass.root = BackwardRoot(
          with_gradients(output.activation, format(chunk, Border::kOutput, microbatch)));
    }
    if (last_use) drop_batch(microbatch);
    for (at::Tensor& tensor : output.activation) tensor = tensor.detach();
    return std::move(output.activation);
  }

  StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output,
                        bool defer_weights) override {
    DistributedDataParallel& store = *model_.chunks[chunk].store;
    Pass& pass = passes_[chunk][microbatch];
    const Region region(timers_, "backward-compute", 2, Section::kBackward);
    if (defer_weights) store.defer_weight_gradients_to(&pass.weight_gradients);
    pass.offload.begin_backward();
    const at::TensorList grads =
        pass.root_grad.defined() ? at::TensorList(pass.root_grad) : at::TensorList(grad_output);
    pass.tape.backward(std::move(pass.root), grads);
    store.defer_weight_gradients_to(nullptr);
    StageTensors input_grads = take_grads(chunk, microbatch);
    std::vector<std::function<void()>> weight_gradients = std::move(pass.weight_gradients);
    pass = Pass();
    pass.weight_gradients = std::move(weight_gradients);
    return input_grads;
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
  void warm_up() {
    const Batch& batch = batch_of(0);
    const auto run_chunks =
        [&](const std::function<void(ModelChunk&, int chunk, const StageTensors& input)>& run) {
          for (size_t i = 0; i < model_.chunks.size(); ++i) {
            StageTensors input;
            if (!model_.chunks[i].module->slice().starts())
              for (const TensorFormat& one : format(static_cast<int>(i), Border::kInput, 0))
                input.push_back(at::zeros(
                    one.shape, at::TensorOptions().dtype(one.dtype).device(model_.device())));
            run(model_.chunks[i], static_cast<int>(i), input);
          }
        };
    run_chunks([&](ModelChunk& chunk, int, const StageTensors& input) {
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
        run_chunks([&](ModelChunk& chunk, int number, const StageTensors& input) {
          Pass scratch;
          ForwardContext context = context_of(batch, /*training=*/true);
          context.tape = &scratch.tape;
          context.discarded = true;
          if (options_.per_token_loss) context.loss_grad = options_.loss_scale;
          if (num_auxiliary() > 0)
            take_auxiliary(context, batch, scratch, at::zeros_like(auxiliary_totals()),
                           options_.loss_scale, own_factors_);
          std::vector<BackwardEnd> ends;
          const StageOutput output =
              task_.forward_step(*chunk.module, batch, start_of(input, number, 0, ends), context);
          const StageTensors roots =
              output.loss.sum.defined()
                  ? StageTensors{output.loss.sum}
                  : with_gradients(output.activation, format(number, Border::kOutput, 0));
          StageTensors grads;
          for (const at::Tensor& root : roots) grads.push_back(at::ones_like(root));
          scratch.tape.backward(BackwardRoot(roots), grads);
          if (model_.pipeline->splits_vocabulary()) warm_up_vocabulary(chunk, batch, output);
        });
      }
      DistributedDataParallel::finish_grad_sync(model_.stores());
      for (ModelChunk& chunk : model_.chunks) chunk.store->zero_grad(options_.num_microbatches);
      // Casting quantised weights records their amax, which the step itself must do.
      for (ModelChunk& chunk : model_.chunks) chunk.store->forget_what_is_kept();
    }
    synchronize(model_.device());
  }

  at::Tensor totals() const { return totals_; }
  // [n, 2]: (sum, weight) of each auxiliary loss.
  at::Tensor auxiliary_totals() const {
    return totals_.narrow(0, 2 + num_metrics_, 2 * num_auxiliary()).view({num_auxiliary(), 2});
  }
  int64_t num_auxiliary() const { return static_cast<int64_t>(auxiliary_.size()); }
  // Micro-batches are read in order, when a chunk first asks for one, or for one before it.
  const Batch& batch_of(int microbatch) {
    const int end = std::min(microbatch + microbatches_ahead_, options_.num_microbatches - 1);
    for (; loaded_ <= end; ++loaded_) read_next();
    return batches_[microbatch];
  }

  // Reads all micro-batches of the step, to know the weights of losses with weights of their own:
  // what the step's division by the main weight makes of the factor is 1 / own weight.
  //
  // Communication: one all-reduce of these weights over dp_cp.
  void sum_own_weights() {
    if (!options_.training || !options_.per_token_loss || task_.own_weights.empty()) return;
    batch_of(options_.num_microbatches - 1);
    const at::Tensor weights = at::zeros({1 + own_factors_.numel()}, own_factors_.options());
    for (const Batch& batch : batches_) {
      weights[0] += task_.loss_weight(batch);
      for (size_t k = 0; k < task_.own_weights.size(); ++k)
        weights[static_cast<int64_t>(k) + 1] += task_.own_weights[k].second(batch);
    }
    model_.groups().dp_cp.all_reduce(weights)->wait();
    const at::Tensor main = at::where(weights[0] == 0, 1.0, weights[0]),
                     own = weights.narrow(0, 1, own_factors_.numel());
    own_factors_ = at::where(own == 0, 0.0, main / own);
  }

  // Runs all micro-batches of a step through the whole model, which is one segment, as CUDA graphs
  // if the store allows it.
  void run_graphs(MicrobatchGraphs& graphs) {
    DistributedDataParallel& store = *model_.chunks.front().store;
    // What differs between steps is an input of the graph.
    const at::Tensor scales =
        own_factors_.numel() == 0
            ? options_.loss_scale
            : at::cat({options_.loss_scale.reshape({1}).to(at::kDouble), own_factors_});
    const MicrobatchGraphs::Pass pass = [this](const Batch& part, const at::Tensor& given) {
      return whole_pass(part, given);
    };
    for (int i = 0; i < options_.num_microbatches; ++i) {
      const bool first = i == 0, last = i + 1 == options_.num_microbatches;
      if ((first && store.gathers_under_first_pass()) ||
          (last && store.reduces_under_last_pass())) {
        forward(0, i, {});
        backward(0, i, {}, /*defer_weights=*/false);
        continue;
      }
      const SectionScope section(timers_.sections(), Section::kForward);  // includes the backward
      if (timers_.sections() != nullptr) timers_.sections()->set_muted(true);
      Pass encoders;
      const Batch batch = with_media_encoded(batch_of(i), encoders);
      const MicrobatchGraphs::Result result = graphs.is_new(batch, scales)
                                                  ? pass(batch, scales)
                                                  : graphs.run(batch, scales, first, store, pass);
      totals_ += result.totals;
      if (encoders.root.defined())
        encoders.tape.backward(std::move(encoders.root), result.encoded_media_grad);
      if (timers_.sections() != nullptr) timers_.sections()->set_muted(false);
      drop_batch(i);
    }
  }

 private:
  void read_next() {
    Batch& batch = batches_[loaded_];
    {
      const Region part(timers_, "batch-generator", 2, Section::kData);
      batch = next_batch_();
      if (model_.pipeline->has_borders()) formats_[loaded_] = formats_of(batch);
      uses_left_.push_back(static_cast<int>(model_.chunks.size()) +
                           (model_.pipeline->splits_vocabulary() ? 1 : 0));
    }
    const Region region(timers_, "forward-compute", 2, Section::kForward);
    for (const PretrainTask::Ahead& work : ahead_)
      if (work.microbatches > 0) work.prepare(batch, options_.training);
  }

  // Formats outlive the batch that they are read from.
  static size_t place_of(int chunk, Border border) {
    return 3 * static_cast<size_t>(chunk) + static_cast<size_t>(border);
  }
  std::vector<TensorFormats> formats_of(const Batch& batch) const {
    std::vector<TensorFormats> formats;
    for (const ModelChunk& chunk : model_.chunks)
      for (const Border border : {Border::kInput, Border::kOutput, Border::kHidden})
        formats.push_back(model_.pipeline->format(*chunk.module, border, batch));
    return formats;
  }

  static StageTensors with_gradients(const StageTensors& tensors, const TensorFormats& formats) {
    StageTensors out;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (formats.at(i).has_gradient()) out.push_back(tensors[i]);
    return out;
  }
  // The inputs of a differentiable pass; `ends` catch the gradients of those that have one.
  StageTensors start_of(const StageTensors& input, int chunk, int microbatch,
                        std::vector<BackwardEnd>& ends) {
    const TensorFormats formats =
        input.empty() ? TensorFormats() : format(chunk, Border::kInput, microbatch);
    StageTensors start;
    for (size_t i = 0; i < input.size(); ++i) {
      start.push_back(input[i].detach());
      if (formats.at(i).has_gradient()) ends.emplace_back(start.back());
    }
    return start;
  }
  // The gradients of the pass's inputs; 0 for one that nothing was computed from.
  StageTensors take_grads(int chunk, int microbatch) {
    StageTensors grads;
    bool reached = false, empty = true;
    for (BackwardEnd& end : passes_[chunk][microbatch].inputs) {
      grads.push_back(end.take_grad());
      reached = reached || grads.back().defined();
    }
    size_t i = 0;
    for (const TensorFormat& one :
         grads.empty() ? TensorFormats() : format(chunk, Border::kInput, microbatch)) {
      if (!one.has_gradient()) continue;
      at::Tensor& grad = grads[i++];
      empty = empty && c10::multiply_integers(one.shape) == 0;
      if (!grad.defined())
        grad = at::zeros(one.shape, at::TensorOptions().dtype(one.dtype).device(model_.device()));
    }
    MEGATRON_ASSERT(reached || empty, "the backward of a stage did not reach its input");
    return grads;
  }

  void warm_up_vocabulary(ModelChunk& chunk, const Batch& batch, const StageOutput& output) {
    const at::Tensor hidden = at::zeros_like(output.activation.front());
    const std::unique_ptr<VocabularyPass> pass = task_.begin_loss(*chunk.module, batch, hidden);
    const Loss loss = pass->loss(model_.pipeline->links().exchange(hidden, pass->statistics()));
    at::zeros_like(totals_).narrow(0, 0, 2) += pair_of(loss);
    if (options_.training) pass->backward(factor_of(loss, options_.loss_scale));
  }

  // The micro-batch as it runs as a graph; `pass` is that of the encoders.
  Batch with_media_encoded(const Batch& batch, Pass& pass) {
    ForwardContext context = context_of(batch, options_.training);
    context.tape = &pass.tape;
    Batch out = model_.chunks.front().module->with_media_encoded(batch, context);
    if (out.encoded_media.requires_grad()) {
      pass.root = BackwardRoot(out.encoded_media);
      out.encoded_media = out.encoded_media.detach().set_requires_grad(true);
    }
    return out;
  }

  // Forward and backward of the whole model, behind its encoders; the totals are those of totals().
  // `scales`: the loss scale [], or with own factors both, [1 + n].
  MicrobatchGraphs::Result whole_pass(const Batch& given, const at::Tensor& scales) {
    const at::Tensor loss_scale =
        scales.dim() == 0 ? scales : scales[0].to(options_.loss_scale.scalar_type());
    const at::Tensor factors =
        scales.dim() == 0 ? own_factors_ : scales.narrow(0, 1, own_factors_.numel());
    Pass pass;
    Batch batch = given;
    BackwardEnd media;
    if (batch.encoded_media.requires_grad()) {
      batch.encoded_media = batch.encoded_media.detach();
      media = BackwardEnd(batch.encoded_media);
    }
    ForwardContext context = context_of(batch, options_.training);
    context.routing = options_.routing;
    context.tape = &pass.tape;
    if (options_.per_token_loss) context.loss_grad = loss_scale;
    const at::Tensor auxiliary = at::zeros_like(auxiliary_totals());
    if (num_auxiliary() > 0) take_auxiliary(context, batch, pass, auxiliary, loss_scale, factors);
    const StageOutput output =
        task_.forward_step(*model_.chunks.front().module, batch, {}, context);
    start_backward(output.loss, loss_scale, pass);
    pass.tape.backward(std::move(pass.root), pass.root_grad);
    const at::Tensor metrics = output.metrics.defined()
                                   ? output.metrics.detach()
                                   : at::zeros({num_metrics_}, totals_.options());
    return {at::cat({pair_of(output.loss), metrics, auxiliary.view({-1})}),
            media.defined() ? media.take_grad() : at::Tensor()};
  }

  // Lets the pass add the model's auxiliary losses.
  void take_auxiliary(ForwardContext& context, const Batch& batch, Pass& pass,
                      const at::Tensor& totals, const at::Tensor& loss_scale,
                      const at::Tensor& own_factors) {
    if (SequenceTotals totals = batch.totals; totals.loss_weight.defined()) {
      if (task_.sequence_weights) totals.loss_weight = task_.sequence_weights(totals.loss_weight);
      context.tokens.of_sequence = weights_of_sequences(totals, options_.per_token_loss);
    }
    const bool divided = model_.divides_rows();
    pass.auxiliary_losses.emplace(
        AuxiliaryLosses::Options{
            options_.per_token_loss, auxiliary_, totals, !divided || model_.groups().tp.rank() == 0,
            [this, divided, loss_scale, own_factors](const at::Tensor& sum,
                                                     const at::Tensor& weight, LossRows rows,
                                                     std::string_view name) {
              const at::Tensor factor =
                  auxiliary_factor({sum, weight}, loss_scale, divided && rows == LossRows::kOwn);
              const std::optional<int64_t> own = own_weight(name);
              return own ? factor * own_factors[*own].to(factor.scalar_type()) : factor;
            }},
        pass.tape);
    context.auxiliary_losses = &*pass.auxiliary_losses;
  }

  // Which of the task's own weights divides a loss; none: that of the main loss does.
  std::optional<int64_t> own_weight(std::string_view name) const {
    for (size_t k = 0; k < task_.own_weights.size(); ++k)
      if (task_.own_weights[k].first == name) return static_cast<int64_t>(k);
    return std::nullopt;
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
    const at::Tensor factor = loss_scale.to(loss.sum.scalar_type());
    if (options_.per_token_loss) return factor;
    return factor / at::clamp_min(whole_weight(loss, /*over_tensor_ranks=*/false), 1).reshape({});
  }

  // The same for an auxiliary loss, whose weight may be less than 1, or undefined: then nothing
  // divides it. `over_tensor_ranks`: each tensor rank has a part of it.
  at::Tensor auxiliary_factor(const Loss& loss, const at::Tensor& loss_scale,
                              bool over_tensor_ranks) {
    const at::Tensor factor = loss_scale.to(loss.sum.scalar_type());
    if (options_.per_token_loss || !loss.weight.defined()) return factor;
    const at::Tensor weight = whole_weight(loss, over_tensor_ranks);
    return factor / at::where(weight == 0, 1, weight).reshape({});
  }

  // [1]: the weight of the micro-batch's whole sequences.
  at::Tensor whole_weight(const Loss& loss, bool over_tensor_ranks) const {
    const at::Tensor weight = loss.weight.detach().to(loss.sum.scalar_type()).reshape({1}).clone();
    model_.groups().cp.all_reduce(weight)->wait();
    if (over_tensor_ranks) model_.groups().tp.all_reduce(weight)->wait();
    return weight;
  }

  void drop_batch(int microbatch) { batches_[microbatch] = {}; }

  TrainedModel& model_;
  const PretrainTask& task_;
  const PassOptions& options_;
  const std::function<Batch()>& next_batch_;
  Timers& timers_;
  std::vector<Batch> batches_;
  std::vector<std::vector<TensorFormats>> formats_;  // by micro-batch and place_of()
  std::vector<int> uses_left_;  // by micro-batch: remaining passes that read it
  int loaded_ = 0;
  std::vector<PretrainTask::Ahead> ahead_;  // by chunk; empty: the task has none
  int microbatches_ahead_ = 0;
  std::vector<std::vector<Pass>> passes_;                    // by chunk and micro-batch
  std::vector<std::unique_ptr<VocabularyPass>> vocabulary_;  // by micro-batch
  const std::vector<std::string> auxiliary_;                 // names of the auxiliary losses
  const int64_t num_metrics_;
  at::Tensor totals_;
  at::Tensor own_factors_;  // [n] fp64: main weight over own weight; 1 until that is known
};

// Forward passes through the reference model.
class ReferencePasses final : public StageCompute {
 public:
  ReferencePasses(const Pipeline& pipeline, std::vector<ModelChunk>& chunks,
                  const PretrainTask& task, std::vector<Batch>& batches)
      : pipeline_(pipeline), chunks_(chunks), task_(task), batches_(batches) {}

  TensorFormats format(int chunk, Border border, int microbatch) override {
    return pipeline_.format(*chunks_[chunk].module, border, batches_[microbatch]);
  }
  StageTensors forward(int chunk, int microbatch, const StageTensors& input) override {
    Batch& batch = batches_[microbatch];
    StageOutput output = task_.reference_step(*chunks_[chunk].module, batch, input,
                                              context_of(batch, /*training=*/false));
    if (!output.loss.sum.defined()) return std::move(output.activation);
    batch.reference = output.loss.sum;
    return {};
  }
  StageTensors backward(int, int, const StageTensors&, bool) override {
    throw_error("a reference model has no backward");
  }
  void weight_backward(int, int) override {}

 private:
  const Pipeline& pipeline_;
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
  ReferencePasses passes(*model.pipeline, model.reference.empty() ? model.chunks : model.reference,
                         task, batches);
  model.pipeline->run(static_cast<int>(batches.size()), /*training=*/false, passes);
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
    passes->warm_up();
  }
  if (task.reference_step) {
    run_reference(model, task, read, timers);
    taken = 0;
    passes.emplace(model, task, options, source, timers);
  }
  passes->sum_own_weights();
  // What routers decide is recorded and imposed on the host, between kernels.
  const bool decides_on_host = options.routing != nullptr;
  if (options.training && model.graphs && !decides_on_host && model.graphs->begin_step()) {
    passes->run_graphs(*model.graphs);
  } else {
    model.pipeline->run(options.num_microbatches, options.training, *passes);
  }
  const at::Tensor totals = passes->totals();
  if (passes->num_auxiliary() > 0 && model.divides_rows()) {
    const at::Tensor sums = passes->auxiliary_totals().contiguous();
    model.groups().tp.all_reduce(sums)->wait();
    passes->auxiliary_totals().copy_(sums);
  }
  model.groups().dp_cp.all_reduce(totals)->wait();
  model.groups().pp.all_reduce(totals)->wait();  // zero on the other stages
  sum_over_modules(totals, model.groups());      // and on the encoders' own ranks
  return totals;
}

}  // namespace megatron
