// Steps of a model that reads images and sounds, its decoder as CUDA graphs, are bit-identical to
// eager ones.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megatron/models/vision/packed_images.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

const std::string kModel =
    "pretrain --task mimo --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 "
    "--attention-dropout 0 --bf16 --tokenizer-type NullTokenizer --vocab-size 501 --mock-data "
    "--num-workers 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 8 --lr 1e-3 "
    "--no-gemm-tuning --image-token-id 500 --vision-num-layers 2 --vision-hidden-size 64 "
    "--vision-ffn-hidden-size 128 --vision-num-attention-heads 2 --patch-dim 4 ";
const std::string kClip =
    "--position-embedding-type rope --vision-model-type clip --img-h 16 --img-w 16 "
    "--disable-vision-class-token ";
const std::string kQwen =
    "--position-embedding-type mrope --mrope-section 16 8 8 --vision-model-type qwen2 "
    "--pixel-shuffle --patch-dim 2 --img-h 16 --img-w 16 --disable-vision-class-token ";
const std::string kWhisper =
    "--audio-model-type whisper --audio-num-layers 1 --audio-hidden-size 64 "
    "--audio-ffn-hidden-size 128 --audio-num-attention-heads 2 --audio-mel-bins 8 "
    "--audio-token-id 499 ";

struct Result {
  std::vector<at::Tensor> losses;
  at::Tensor weights;
  int64_t without_images = 0;  // micro-batches
};

Result train(const std::string& line) {
  const Arguments a = parse_line(kModel + line);
  const PretrainTask task = find_task(a);
  const ParallelGroups groups;
  const at::Device gpu(at::kCUDA, 0);
  const auto tokenizer = make_tokenizer(a.tokenizer);
  TrainedModel model =
      build_model(task, a, vocabulary_of(a, *tokenizer), groups, at::kBFloat16, gpu, StartPoint{});
  const auto loader =
      make_train_loader(a, groups, build_datasets(task, a, *tokenizer).train, 0, gpu);
  BatchMaker maker(gpu, groups.cp, 0, task.addition(model.chunks.front().module->config()));
  Timers timers(0);
  Result result;
  for (int step = 0; step < 6; ++step) {
    const StepOutcome outcome = train_step(
        model, task, step_options(a, 0),
        [&] {
          const Batch batch = maker.make(loader->next());
          result.without_images += batch.images->all_pictures == 0;
          return batch;
        },
        timers);
    result.losses.push_back(outcome.loss.cpu());  // waits
    maker.take_held();
  }
  result.weights = model.chunks.front().store->flat_values().cpu();
  return result;
}

TEST(MimoGraphGpu, LeavesTheBitsOfEagerSteps) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const std::string& line :
       {kClip + "--hidden-dropout 0.1", kClip + "--hidden-dropout 0 --freeze vision_model",
        kClip + "--hidden-dropout 0 --freeze vision_model --mimo-encoder-prefetch",
        kClip + "--hidden-dropout 0 --freeze language_model",
        kClip + "--hidden-dropout 0 --freeze-except vision_projection",
        kClip + "--hidden-dropout 0 --recompute-vision", kQwen + "--hidden-dropout 0",
        kClip + kWhisper + "--hidden-dropout 0 --no-calculate-per-token-loss"}) {
    const Result eager = train(line),
                 graphs = train(line + " --cuda-graph-impl local --cuda-graph-warmup-steps 1");
    for (size_t i = 0; i < eager.losses.size(); ++i)
      EXPECT_TRUE(at::equal(eager.losses[i], graphs.losses[i]))
          << line << ", step " << i << ": " << eager.losses[i] << graphs.losses[i];
    EXPECT_FALSE(at::equal(eager.losses[4], eager.losses[5])) << line;
    EXPECT_TRUE(at::equal(eager.weights, graphs.weights)) << line;
    EXPECT_GT(eager.without_images, 0) << line;
  }
}

}  // namespace
}  // namespace megatron
