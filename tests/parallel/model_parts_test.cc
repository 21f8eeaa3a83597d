// A model with media that starts from pretrained parts holds the same bits under every layout.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

const std::string kLlava = MEGATRON_SOURCE_DIR "/tests/golden/multimodal/llava";

// The encoder takes the place of the whole model's own, with a projector that begins at random.
const std::string kRun = "--task mimo --pretrained-checkpoint " + kLlava +
                         " --pretrained-vision-model " + kLlava +
                         " --seq-length 24 --mock-data --num-workers 0 --micro-batch-size 1 "
                         "--global-batch-size 4 --train-iters 4 --lr 1e-2 --eval-iters 0 --device "
                         "cpu --make-vocab-size-divisible-by 16 ";

struct Layout {
  const char* name;
  int ranks;
  const char* flags;
};

constexpr Layout kLayouts[] = {
    {"tp2_sp", 2, "--tensor-model-parallel-size 2 --sequence-parallel"},
    {"tp2_encoder", 2, "--tensor-model-parallel-size 2 --encoder-tensor-model-parallel-size 2"},
    {"v_pp2", 2, "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout V|EttL"},
    {"pp2_zero3", 4,
     "--pipeline-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy "
     "optim_grads_params"}};

TrainedModel build(const Arguments& arguments, const ParallelGroups& groups, Agreement* agreement) {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
  const Vocabulary vocabulary = vocabulary_of(arguments, *tokenizer);
  const PretrainTask task = find_task(arguments);
  StartPoint start;
  start.checkpoint = open_hf_folder(kLlava).checkpoint;
  start.weights_only = true;
  task.join_parts(arguments, vocabulary, start);
  EXPECT_EQ(start.random, std::vector<std::string>{"vision_projection.*"});
  EXPECT_EQ(start.origin(), nullptr);
  return build_model(task, arguments, vocabulary, groups, at::kFloat, at::kCPU, start, agreement);
}

std::map<std::string, at::Tensor> memory_of(TrainedModel& model) {
  std::map<std::string, at::Tensor> all;
  std::vector<StateTensor> tensors = model.optimizer->tensors();
  for (const ModelChunk& chunk : model.chunks)
    for (StateTensor& entry : chunk.store->state()) tensors.push_back(std::move(entry));
  for (const StateTensor& entry : tensors) all[entry.description.key] = entry.data.clone();
  return all;
}

TEST(ModelPartsLayouts, HoldTheSameBits) {
  const fs::path root = fs::path(testing::TempDir()) / "model_parts_layouts";
  fs::remove_all(root);
  set_quiet(true);
  Arguments alone = parse_run(kRun, 1);
  alone.training.save = root.string();
  {
    const ParallelGroups groups;
    TrainedModel model = build(alone, groups, nullptr);
    const Checkpoint given = open_hf_folder(kLlava).checkpoint;
    for (const auto& [name, tensor] : memory_of(model)) {
      EXPECT_TRUE(name.starts_with("optimizer.") || given.manifest().tensors.contains(name));
      // Neither zeros nor memory that nothing was written to
      const bool weight = name.starts_with("vision_projection") && name.ends_with("weight");
      EXPECT_TRUE(!weight || tensor.abs().max().item<double>() > 0) << name;
      EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
    }
    TrainingLog log(alone.training, RunFacts{});
    Timers timers(0);
    RunState state;
    state.step = model.optimizer->read_state();
    state.schedule = model.optimizer->schedule();
    Agreement one;
    Checkpointer(alone, model, log, timers, {{"config.yaml", resolved_yaml(alone)}},
                 /*replace_existing=*/false, &one)
        .save(state);
  }
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    const Arguments arguments = parse_run(cat(kRun, layout.flags), layout.ranks);
    std::vector<std::string> differences(static_cast<size_t>(layout.ranks));
    ThreadAgreement::Room room(layout.ranks);
    run_ranks(layout.ranks, [&](const std::shared_ptr<Backend>& world) {
      at::set_num_threads(1);
      const ParallelGroups groups = make_parallel_groups(arguments.parallel, world);
      ThreadAgreement agreement(room, world->rank());
      TrainedModel model = build(arguments, groups, &agreement);
      const auto joined = memory_of(model);
      const Checkpoint checkpoint(find_checkpoints(root).at(0).directory);
      load_model_state(checkpoint, run_state_from_json(checkpoint.state(), "saved"),
                       arguments.optimizer, model, {}, &agreement);
      std::string& text = differences[static_cast<size_t>(world->rank())];
      for (const auto& [name, tensor] : memory_of(model))
        if (!at::equal(joined.at(name), tensor)) text += name + " ";
    });
    for (const std::string& text : differences) EXPECT_EQ(text, "");
  }
  set_quiet(false);
  fs::remove_all(root);
}

}  // namespace
}  // namespace megatron
