// A small model with threads as ranks: every schedule gives the gradients of the serial model, on a
// backend that buffers sends and on one that does not.
#include "megatron/pipeline_parallel/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "testing.h"
#include "tests/unit/forwarding_backend.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using Kind = Action::Kind;

// Sends that wait, when they are waited for, until their receive has been posted, as NCCL's do.
// Messages of a link run one way; the receiver's token comes back the other way.
class RendezvousBackend final : public ForwardingBackend {
 public:
  struct Counts {
    std::atomic<int> receives_under_way = 0, most_receives_under_way = 0;
  };
  RendezvousBackend(std::shared_ptr<Backend> inner, std::shared_ptr<Counts> counts)
      : ForwardingBackend(std::move(inner)), counts_(std::move(counts)) {}

  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<RendezvousBackend>(inner_->subgroup(ranks, name, use), counts_);
  }

  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    inner_->send(tensor, peer)->wait();
    return std::make_shared<Callback>(
        [token = inner_->recv(at::zeros({1}), peer)] { token->wait(); });
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    inner_->send(at::zeros({1}), peer)->wait();
    const int now = ++counts_->receives_under_way;
    counts_->most_receives_under_way = std::max(counts_->most_receives_under_way.load(), now);
    return std::make_shared<Callback>([this, counts = counts_, work = inner_->recv(tensor, peer)] {
      work->wait();
      --counts->receives_under_way;
    });
  }

 private:
  class Callback final : public Work {
   public:
    explicit Callback(std::function<void()> body) : body_(std::move(body)) {}
    void wait() override {
      if (body_) std::exchange(body_, nullptr)();
    }

   private:
    std::function<void()> body_;
  };
  std::shared_ptr<Counts> counts_;
};

// Segments y = tanh(x W); the loss is sum(y * target).
struct Model {
  static constexpr int64_t kRows = 3, kWidth = 5;
  std::vector<at::Tensor> weights, data, targets;  // by segment, by micro-batch, by micro-batch

  Model(int segments, int microbatches, bool ragged = false) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const auto draw = [&](at::IntArrayRef shape) {
      return at::randn(shape, generator, at::kDouble);
    };
    for (int s = 0; s < segments; ++s) weights.push_back(draw({kWidth, kWidth}) * 0.5);
    for (int m = 0; m < microbatches; ++m) {
      const int64_t rows = ragged ? kRows + m % 3 : kRows;
      data.push_back(draw({rows, kWidth}));
      targets.push_back(draw({rows, kWidth}));
    }
  }

  // Gradients of all weights, by autograd, on one rank.
  std::vector<at::Tensor> serial() const {
    std::vector<at::Tensor> leaves, grads;
    for (const at::Tensor& w : weights) leaves.push_back(w.clone().set_requires_grad(true));
    for (size_t m = 0; m < data.size(); ++m) {
      at::Tensor x = data[m];
      for (const at::Tensor& w : leaves) x = at::tanh(at::matmul(x, w));
      (x * targets[m]).sum().backward();
    }
    for (const at::Tensor& w : leaves) grads.push_back(w.grad());
    return grads;
  }
};

// One rank's chunks, with hand-written backward passes.
class ToyStage : public StageCompute {
 public:
  ToyStage(const Model& model, const Schedule& schedule, int stage)
      : model_(model), schedule_(schedule), stage_(stage) {
    for (int c = 0; c < schedule.num_chunks; ++c)
      grads.push_back(at::zeros({Model::kWidth, Model::kWidth}, at::kDouble));
  }

  TensorFormats format(int, Border, int microbatch) override {
    return {{given_shape.empty() ? model_.data[static_cast<size_t>(microbatch)].sizes().vec()
                                 : given_shape,
             at::kDouble}};
  }
  StageTensors forward(int chunk, int microbatch, const StageTensors& input) override {
    calls.push_back({Kind::kForward, chunk, microbatch});
    const int segment = schedule_.segment(stage_, chunk);
    EXPECT_EQ(input.size(), segment > 0 ? 1u : 0u);
    const at::Tensor x = segment > 0 ? input.front() : model_.data[static_cast<size_t>(microbatch)];
    EXPECT_FALSE(x.requires_grad());
    const at::Tensor y = at::tanh(at::matmul(x, model_.weights[static_cast<size_t>(segment)]));
    kept_[{chunk, microbatch}] = {x, y};
    if (segment + 1 == schedule_.num_segments()) {
      losses += (y * model_.targets[static_cast<size_t>(microbatch)]).sum();
      return {};
    }
    return {watched(y.clone())};
  }

  StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output,
                        bool defer_weights) override {
    calls.push_back({defer_weights ? Kind::kBackwardInput : Kind::kBackward, chunk, microbatch});
    const int segment = schedule_.segment(stage_, chunk);
    const bool last = segment + 1 == schedule_.num_segments();
    EXPECT_EQ(grad_output.size(), last ? 0u : 1u);
    Kept& kept = kept_.at({chunk, microbatch});
    const at::Tensor dy =
        last ? model_.targets[static_cast<size_t>(microbatch)] : grad_output.front();
    kept.dz = dy * (1 - kept.y * kept.y);
    const at::Tensor dx = at::matmul(kept.dz, model_.weights[static_cast<size_t>(segment)].t());
    if (!defer_weights) finish(chunk, microbatch);
    return segment > 0 ? StageTensors{watched(dx)} : StageTensors();
  }

  void weight_backward(int chunk, int microbatch) override {
    calls.push_back({Kind::kBackwardWeight, chunk, microbatch});
    finish(chunk, microbatch);
  }

  // Storages of returned tensors that somebody still holds.
  int alive() const {
    int count = 0;
    for (const auto& storage : returned_) count += !storage.expired();
    return count;
  }

  std::vector<at::Tensor> grads;  // by chunk
  at::Tensor losses = at::zeros({}, at::kDouble);
  std::vector<Action> calls;
  int most_alive = 0;
  std::vector<int64_t> given_shape;  // stated in place of the data's

 private:
  struct Kept {
    at::Tensor x, y, dz;
  };
  void finish(int chunk, int microbatch) {
    const Kept kept = kept_.at({chunk, microbatch});
    kept_.erase({chunk, microbatch});
    grads[static_cast<size_t>(chunk)] += at::matmul(kept.x.t(), kept.dz);
  }
  at::Tensor watched(const at::Tensor& result) {
    returned_.emplace_back(result.storage().getWeakStorageImpl());
    most_alive = std::max(most_alive, alive());
    return result;
  }

  const Model& model_;
  const Schedule& schedule_;
  int stage_;
  std::map<std::pair<int, int>, Kept> kept_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> returned_;
};

struct Run {
  bool overlap = true;
  bool rendezvous = false;
  bool ragged = false;
};

void expect_serial_gradients(const Schedule& schedule, const Run& run) {
  SCOPED_TRACE(cat(schedule.name, " stages ", schedule.num_stages, " chunks ", schedule.num_chunks,
                   " micro-batches ", schedule.num_microbatches, run.overlap ? " overlap" : "",
                   run.rendezvous ? " rendezvous" : ""));
  const Model model(schedule.num_segments(), schedule.num_microbatches, run.ragged);
  const std::vector<at::Tensor> expected = model.serial();
  run_ranks(schedule.num_stages, [&](const std::shared_ptr<Backend>& world) {
    const auto counts = std::make_shared<RendezvousBackend::Counts>();
    const ProcessGroup pp(
        run.rendezvous ? std::make_shared<RendezvousBackend>(world, counts) : world, "pp");
    const PipelineLinks links(pp, schedule, at::kCPU, run.overlap);
    ToyStage stage(model, schedule, pp.rank());
    run_pipeline(schedule, stage, links, at::kCPU);
    EXPECT_EQ(stage.calls, schedule.stages[static_cast<size_t>(pp.rank())]);
    EXPECT_EQ(stage.alive(), 0);
    EXPECT_EQ(counts->receives_under_way, 0);
    for (int chunk = 0; chunk < schedule.num_chunks; ++chunk) {
      const int segment = schedule.segment(pp.rank(), chunk);
      EXPECT_TRUE(at::allclose(stage.grads[static_cast<size_t>(chunk)],
                               expected[static_cast<size_t>(segment)], 1e-11, 1e-12))
          << "segment " << segment;
    }
  });
}

// Every schedule over this shape that is legal.
std::vector<Schedule> schedules(int stages, int chunks, int microbatches) {
  std::vector<Schedule> out;
  for (const ScheduleKind kind : kAllKinds) {
    try {
      out.push_back(make_schedule(kind, shape_of(stages, chunks, microbatches)));
    } catch (const UsageError&) {
    }
  }
  return out;
}

TEST(Executor, EverySchedulesGradientsAreTheSerialOnes) {
  int runs = 0;
  for (int stages = 1; stages <= 4; ++stages)
    for (int chunks = 1; chunks <= 3; ++chunks)
      for (const int microbatches : {1, 2, 4, 7, 9})
        for (const Schedule& schedule : schedules(stages, chunks, microbatches)) {
          expect_serial_gradients(schedule, {});
          ++runs;
        }
  EXPECT_GT(runs, 150);
}

TEST(Executor, NoScheduleNeedsBufferedSends) {
  for (const bool overlap : {true, false})
    for (int stages = 2; stages <= 4; ++stages)
      for (int chunks = 1; chunks <= 3; ++chunks)
        for (const int microbatches : {1, 5, 8})
          for (const Schedule& schedule : schedules(stages, chunks, microbatches))
            expect_serial_gradients(schedule, {.overlap = overlap, .rendezvous = true});
}

TEST(Executor, MicrobatchesMayDifferInShape) {
  for (const Schedule& schedule : schedules(3, 2, 6))
    expect_serial_gradients(schedule, {.ragged = true});
}

// With the vocabulary over the stages: each has every n-th of the hidden states' columns; the loss
// is half the square of the sum of all.
class ToyVocabularyStage final : public StageCompute {
 public:
  ToyVocabularyStage(const Model& model, int stage)
      : stage_(stage), model_(model), own_(at::zeros({Model::kWidth}, at::kDouble)) {
    for (int64_t i = stage; i < Model::kWidth; i += static_cast<int64_t>(model.weights.size()))
      own_[i] = 1.0;
  }
  TensorFormats format(int, Border, int microbatch) override {
    return {{model_.data[static_cast<size_t>(microbatch)].sizes().vec(), at::kDouble}};
  }
  StageTensors forward(int chunk, int microbatch, const StageTensors& input) override {
    calls.push_back({Kind::kForward, chunk, microbatch});
    const at::Tensor x =
        !input.empty() ? input.front() : model_.data[static_cast<size_t>(microbatch)];
    const at::Tensor y = at::tanh(at::matmul(x, weight()));
    kept_[microbatch] = {x, y};
    return {y};
  }
  at::Tensor head(int microbatch, const at::Tensor& hidden) override {
    calls.push_back({Kind::kHead, 0, microbatch});
    rows_[microbatch] = hidden.size(0);
    return (hidden * own_).sum().reshape({1});
  }
  at::Tensor loss(int microbatch, const at::Tensor& statistics) override {
    calls.push_back({Kind::kLoss, 0, microbatch});
    const at::Tensor sum = statistics.sum();
    losses += sum * sum / 2;
    return (sum * own_).expand({rows_.at(microbatch), Model::kWidth});
  }
  StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output, bool) override {
    calls.push_back({Kind::kBackward, chunk, microbatch});
    const auto [x, y] = kept_.at(microbatch);
    const at::Tensor dz = grad_output.front() * (1 - y * y);
    grad += at::matmul(x.t(), dz);
    return {at::matmul(dz, weight().t())};
  }
  void weight_backward(int, int) override { FAIL(); }

  at::Tensor grad = at::zeros({Model::kWidth, Model::kWidth}, at::kDouble),
             losses = at::zeros({}, at::kDouble);
  std::vector<Action> calls;

 private:
  const at::Tensor& weight() const { return model_.weights[static_cast<size_t>(stage_)]; }

  int stage_;
  const Model& model_;
  at::Tensor own_;
  std::map<int, std::pair<at::Tensor, at::Tensor>> kept_;
  std::map<int, int64_t> rows_;
};

TEST(Executor, TheVocabularyOverTheStages) {
  for (const bool overlap : {true, false})
    for (const bool rendezvous : {true, false})
      for (int stages = 2; stages <= 5; ++stages)
        for (const int microbatches : {1, 2, 3, 8}) {
          SCOPED_TRACE(
              cat(stages, " stages, ", microbatches, " micro-batches", overlap ? ", overlap" : ""));
          ScheduleShape shape = shape_of(stages, 1, microbatches);
          shape.vocab_parallel = true;
          const Schedule schedule = make_schedule(ScheduleKind::k1F1B, shape);
          const Schedule evaluation = make_forward_schedule(ScheduleKind::k1F1B, shape);
          const Model model(stages, microbatches, /*ragged=*/true);
          std::vector<at::Tensor> leaves;
          for (const at::Tensor& w : model.weights)
            leaves.push_back(w.clone().set_requires_grad(true));
          at::Tensor loss = at::zeros({}, at::kDouble);
          for (at::Tensor x : model.data) {
            for (const at::Tensor& w : leaves) x = at::tanh(at::matmul(x, w));
            loss = loss + x.sum() * x.sum() / 2;
          }
          loss.backward();
          run_ranks(stages, [&](const std::shared_ptr<Backend>& world) {
            const auto counts = std::make_shared<RendezvousBackend::Counts>();
            const ProcessGroup pp(
                rendezvous ? std::make_shared<RendezvousBackend>(world, counts) : world, "pp");
            const PipelineLinks links(pp, evaluation, at::kCPU, overlap);
            ToyVocabularyStage stage(model, pp.rank());
            run_pipeline(schedule, stage, links, at::kCPU);
            EXPECT_EQ(stage.calls, schedule.stages[static_cast<size_t>(pp.rank())]);
            EXPECT_TRUE(at::allclose(stage.grad, leaves[static_cast<size_t>(pp.rank())].grad(),
                                     1e-11, 1e-12));
            EXPECT_TRUE(at::allclose(stage.losses, loss.detach()));
            ToyVocabularyStage evaluated(model, pp.rank());
            run_pipeline(evaluation, evaluated, links, at::kCPU);
            EXPECT_TRUE(at::allclose(evaluated.losses, loss.detach()));
          });
        }
}

TEST(Executor, EvaluationRunsForwardOnly) {
  for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kZeroBubbleV}) {
    for (const int microbatches : {1, 2, 5}) {
      const Schedule schedule = make_forward_schedule(kind, shape_of(3, 2, microbatches));
      const Model model(6, microbatches);
      at::Tensor expected = at::zeros({}, at::kDouble);
      for (size_t m = 0; m < model.data.size(); ++m) {
        at::Tensor x = model.data[m];
        for (const at::Tensor& w : model.weights) x = at::tanh(at::matmul(x, w));
        expected += (x * model.targets[m]).sum();
      }
      run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
        const ProcessGroup pp(world, "pp");
        ToyStage stage(model, schedule, pp.rank());
        // Links made for training serve evaluation.
        const PipelineLinks links(pp, make_schedule(kind, shape_of(3, 2, 6)), at::kCPU);
        run_pipeline(schedule, stage, links, at::kCPU);
        const bool has_head = schedule.place(5).stage == pp.rank();
        EXPECT_TRUE(at::allclose(stage.losses, has_head ? expected : at::zeros({}, at::kDouble)));
      });
    }
  }
}

TEST(Executor, HoldsFewBuffersAndSentTensors) {
  constexpr int kMicrobatches = 24;
  for (const bool overlap : {true, false}) {
    for (const ScheduleKind kind : {ScheduleKind::k1F1B, ScheduleKind::kZeroBubbleH1}) {
      const Schedule schedule = make_schedule(kind, shape_of(3, 1, kMicrobatches));
      const Model model(3, kMicrobatches);
      run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
        const auto counts = std::make_shared<RendezvousBackend::Counts>();
        const ProcessGroup pp(std::make_shared<RendezvousBackend>(world, counts), "pp");
        ToyStage stage(model, schedule, pp.rank());
        run_pipeline(schedule, stage, PipelineLinks(pp, schedule, at::kCPU, overlap), at::kCPU);
        EXPECT_LE(counts->most_receives_under_way, overlap ? 2 : 1);
        // What the neighbours may not have used yet: a warm-up's worth each way.
        EXPECT_LE(stage.most_alive, 6);
      });
    }
  }
}

TEST(Executor, AStageThatThrowsStopsAll) {
  struct Failing : ToyStage {
    using ToyStage::ToyStage;
    StageTensors backward(int chunk, int microbatch, const StageTensors& grad_output,
                          bool defer) override {
      if (fails && microbatch == 2) throw_error("out of paper");
      return ToyStage::backward(chunk, microbatch, grad_output, defer);
    }
    bool fails = false;
  };
  for (const ScheduleKind kind : kAllKinds) {
    const Schedule schedule =
        make_schedule(kind, shape_of(4, kind == ScheduleKind::kZeroBubbleV ? 2 : 1, 8));
    const Model model(schedule.num_segments(), 8);
    const auto begin = std::chrono::steady_clock::now();
    const std::string error = error_of([&] {
      run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
        const ProcessGroup pp(world, "pp");
        Failing stage(model, schedule, pp.rank());
        stage.fails = pp.rank() == 2;
        run_pipeline(schedule, stage, PipelineLinks(pp, schedule, at::kCPU), at::kCPU);
      });
    });
    EXPECT_THAT(error, HasSubstr("out of paper"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

TEST(Executor, AWrongShapeIsNamed) {
  const Schedule schedule = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  const Model model(2, 2);
  const std::string error = error_of([&] {
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      const ProcessGroup pp(world, "pp");
      ToyStage stage(model, schedule, pp.rank());
      stage.given_shape = {4, 5};
      run_pipeline(schedule, stage, PipelineLinks(pp, schedule, at::kCPU), at::kCPU);
    });
  });
  EXPECT_THAT(error, HasSubstr("F0.0 on stage 0 returned Double[3, 5] on cpu to pass on; between "
                               "stages are Double[4, 5] on cpu"));
}

TEST(PipelineLinks, JoinNeighboursOnly) {
  const Schedule schedule = make_schedule(ScheduleKind::k1F1B, shape_of(4, 1, 4));
  const Schedule looped = make_schedule(ScheduleKind::k1F1B, shape_of(4, 2, 4));
  run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
    const ProcessGroup pp(world, "pp");
    const PipelineLinks links(pp, schedule, at::kCPU);
    const PipelineLinks with_wrap_around(pp, looped, at::kCPU);
    if (pp.rank() != 0) return;
    EXPECT_EQ(links.to(1).name(), "pp_0_to_1");
    EXPECT_EQ(links.from(1).name(), "pp_1_to_0");
    EXPECT_EQ(links.to(1).size(), 2);
    EXPECT_THAT(error_of([&] { links.to(3); }), HasSubstr("stage 0 has no link to stage 3"));
    EXPECT_THAT(error_of([&] { links.from(2); }), HasSubstr("stage 0 has no link from stage 2"));
    EXPECT_EQ(with_wrap_around.to(3).name(), "pp_0_to_3");
  });
}

}  // namespace
}  // namespace megatron
