// Models with experts that start from dense checkpoints: the experts are those of megatron-core,
// and the same under every layout.
#include "megatron/training/experts/upcycling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

TransformerConfig sparse_config(int64_t experts, int64_t topk, bool before, bool gated) {
  TransformerConfig t;
  t.num_layers = 1;
  t.hidden_size = 4;
  t.num_attention_heads = 1;
  t.ffn_hidden_size = 6;
  t.num_experts = experts;
  t.moe_router_topk = topk;
  t.moe_router_pre_softmax = before;
  t.swiglu = gated;
  t.finalize();
  return t;
}

TEST(Upcycling, ScalesByWhatWeightsDivideTheOutputBy) {
  const auto scale = [](int64_t parts, int64_t copies, int64_t topk, bool before, bool gated) {
    return Upcycling(sparse_config(parts * copies, topk, before, gated), parts).scale();
  };
  EXPECT_NEAR(scale(2, 2, 2, false, true), 1.25992105, 1e-8);
  EXPECT_NEAR(scale(2, 2, 2, true, true), 1.58740105, 1e-8);
  EXPECT_NEAR(scale(2, 2, 2, false, false), 1.41421356, 1e-8);
  EXPECT_NEAR(scale(2, 4, 4, true, false), 2.0, 1e-12);
  EXPECT_EQ(scale(1, 8, 2, false, true), 1.0);
  EXPECT_NEAR(scale(1, 8, 2, true, true), 1.58740105, 1e-8);
}

// Writes tensors as a checkpoint of ours.
Checkpoint checkpoint_of(const fs::path& root, const std::map<std::string, at::Tensor>& tensors) {
  fs::remove_all(root);
  SaveRequest save;
  save.root = root;
  for (const auto& [name, tensor] : tensors) {
    ShardedTensor description;
    description.key = name;
    description.global_shape = tensor.sizes().vec();
    description.data = tensor.data_ptr();
    save.tensors.push_back(description);
  }
  return Checkpoint(save_checkpoint(save).directory);
}

TEST(Upcycling, MakesTheExpertsOfMegatronCore) {
  const SafetensorsFile file(MEGATRON_SOURCE_DIR
                             "/tests/golden/upcycling/upcycling_golden.safetensors");
  const auto golden = read_golden_tensors(file);
  const fs::path root = fs::path(testing::TempDir()) / "upcycling_golden";
  const std::string layer = "decoder.layers.0.mlp.";
  const auto cases = nlohmann::json::parse(file.header().metadata.at("cases"));
  for (const auto& [name, given] : cases.items()) {
    SCOPED_TRACE(name);
    ModelConfig config;
    config.vocab_size = config.padded_vocab_size = 8;
    config.transformer = sparse_config(given["experts"], given["topk"], given["pre_softmax"],
                                       given["activation"] == "swiglu");
    config.transformer.add_bias_linear = given["bias"];
    config.transformer.squared_relu = given["activation"] == "squared_relu";
    std::map<std::string, at::Tensor> dense, experts;
    for (const auto& [key, tensor] : golden) {
      if (key.starts_with(name + "/dense/")) dense[layer + key.substr(name.size() + 7)] = tensor;
      if (key.starts_with(name + "/experts/"))
        experts[layer + key.substr(name.size() + 1)] = tensor;
    }
    for (auto& [key, tensor] : experts) {
      const std::string ours = layer + "experts." + key.substr(layer.size() + 8);
      if (ours != key) experts[ours] = tensor;
    }
    const ParallelGroups groups;
    GPTModel model(config, groups);
    DistributedDataParallel store(model, groups, at::kFloat, at::kCPU);
    store.initialize(config.transformer.seed);
    std::map<std::string, at::Tensor> before;
    model.visit([&](const std::string& key, Parameter& parameter) {
      before[key] = parameter.value.clone();
    });
    const Upcycling upcycling(config.transformer, given["granularity"]);
    std::vector<StateTensor> tensors = store.state();
    std::erase_if(tensors, [](const StateTensor& tensor) {
      return tensor.description.key.find(".mlp.experts.") == std::string::npos;
    });
    upcycling.redirect(tensors);
    std::vector<ShardedTensor> wanted;
    for (const StateTensor& tensor : tensors) {
      wanted.push_back(tensor.description);
      wanted.back().data = tensor.data.data_ptr();
    }
    checkpoint_of(root, dense).load(wanted);
    upcycling.complete(store);
    int64_t compared = 0;
    model.visit([&](const std::string& key, Parameter& parameter) {
      if (const auto expected = experts.find(key); expected != experts.end()) {
        EXPECT_TRUE(at::allclose(parameter.value, expected->second, 1e-6, 1e-7)) << key;
        ++compared;
      } else if (key.ends_with("router.weight")) {
        const at::Tensor rows = golden.at(name + "/router_row").to(at::kLong);
        EXPECT_TRUE(at::equal(parameter.value, before.at(key).index_select(0, rows)));
        ++compared;
      }
    });
    EXPECT_EQ(compared, given["bias"] ? 5 : 3);
  }
  fs::remove_all(root);
}

struct Layout {
  const char* name;
  int ranks;
  const char* flags;
};

// Experts, their rows, layers and flat shards divided.
constexpr Layout kLayouts[] = {
    {"ep2", 2, "--expert-model-parallel-size 2"},
    {"ep2_etp2", 4, "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2"},
    {"tp2_sp_etp2", 2, "--tensor-model-parallel-size 2 --sequence-parallel"},
    {"pp2_zero3", 4,
     "--pipeline-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy "
     "optim_grads_params"},
    {"ep2_dp2_zero1", 4, "--expert-model-parallel-size 2 --use-distributed-optimizer"},
};

constexpr const char* kDense =
    "--num-layers 4 --hidden-size 24 --ffn-hidden-size 36 --num-attention-heads 6 --kv-channels 4 "
    "--seq-length 16 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --tokenizer-type NullTokenizer --vocab-size 101 --mock-data "
    "--num-workers 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 "
    "--eval-iters 0 --device cpu --make-vocab-size-divisible-by 2 ";
constexpr const char* kSparse =
    "--num-experts 6 --moe-ffn-hidden-size 12 --moe-layer-freq ([0]+[1])*2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-use-upcycling "
    "--moe-upcycling-granularity 3 ";

class UpcycledLayouts : public testing::Test {
 protected:
  UpcycledLayouts() : root_(fs::path(testing::TempDir()) / "upcycled_layouts") {
    fs::remove_all(root_);
    set_quiet(true);
  }
  ~UpcycledLayouts() override {
    set_quiet(false);
    fs::remove_all(root_);
  }

  // Builds the model as a run does that starts from the checkpoint, if one is given.
  static TrainedModel build(const Arguments& arguments, const ParallelGroups& groups,
                            const fs::path& start, Agreement* agreement) {
    const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
    StartPoint point;
    if (!start.empty()) {
      point.checkpoint.emplace(find_checkpoints(start).at(0).directory);
      point.weights_only = true;
      point.upcycles = arguments.training.moe_use_upcycling;
    }
    return build_model(gpt_task(), arguments, vocabulary_of(arguments, *tokenizer), groups,
                       model_dtype(arguments.optimizer), at::kCPU, point, agreement);
  }

  void save(const Arguments& arguments, TrainedModel& model, const std::string& folder) const {
    Arguments saved = arguments;
    saved.training.save = (root_ / folder).string();
    TrainingLog log(saved.training, RunFacts{});
    Timers timers(0);
    RunState state;
    state.step = model.optimizer->read_state();
    state.schedule = model.optimizer->schedule();
    Agreement alone;
    Checkpointer(saved, model, log, timers, {}, /*replace_existing=*/false, &alone).save(state);
  }

  Arguments sparse_arguments(const std::string& flags, int ranks) const {
    return parse_run(cat(kDense, kSparse, "--load ", (root_ / "dense").string(), " --save ",
                         (root_ / "none").string(), " ", flags),
                     ranks);
  }

  fs::path root_;
};

std::map<std::string, at::Tensor> memory_of(TrainedModel& model) {
  std::map<std::string, at::Tensor> all;
  std::vector<StateTensor> tensors = model.optimizer->tensors();
  for (const ModelChunk& chunk : model.chunks)
    for (StateTensor& entry : chunk.store->state()) tensors.push_back(std::move(entry));
  for (const StateTensor& entry : tensors) all[entry.description.key] = entry.data.clone();
  return all;
}

// Weights, masters and routers have the bits of one rank's.
TEST_F(UpcycledLayouts, HoldTheSameBits) {
  {
    const ParallelGroups groups;
    const Arguments dense = parse_run(kDense, 1), sparse = sparse_arguments("", 1);
    TrainedModel model = build(dense, groups, {}, nullptr);
    save(dense, model, "dense");
    TrainedModel upcycled = build(sparse, groups, root_ / "dense", nullptr);
    save(sparse, upcycled, "sparse");
  }
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    const Arguments arguments = sparse_arguments(layout.flags, layout.ranks);
    std::vector<std::string> differences(static_cast<size_t>(layout.ranks));
    ThreadAgreement::Room room(layout.ranks);
    run_ranks(layout.ranks, [&](const std::shared_ptr<Backend>& world) {
      at::set_num_threads(1);
      const ParallelGroups groups = make_parallel_groups(arguments.parallel, world);
      ThreadAgreement agreement(room, world->rank());
      TrainedModel model = build(arguments, groups, root_ / "dense", &agreement);
      const auto upcycled = memory_of(model);
      const Checkpoint checkpoint(find_checkpoints(root_ / "sparse").at(0).directory);
      load_model_state(checkpoint, run_state_from_json(checkpoint.state(), "sparse"),
                       arguments.optimizer, model, {}, &agreement);
      std::string& text = differences[static_cast<size_t>(world->rank())];
      for (const auto& [name, tensor] : memory_of(model))
        if (!at::equal(upcycled.at(name), tensor)) text += name + " ";
    });
    for (const std::string& text : differences) EXPECT_EQ(text, "");
  }
}

TEST_F(UpcycledLayouts, ExpertsAreNoDenseModel) {
  const ParallelGroups groups;
  const Arguments sparse = sparse_arguments("", 1);
  Arguments fresh = sparse;
  fresh.training.moe_use_upcycling = false;
  TrainedModel model = build(fresh, groups, {}, nullptr);
  save(fresh, model, "dense");
  EXPECT_THAT(error_of([&] { build(sparse, groups, root_ / "dense", nullptr); }),
              testing::HasSubstr("holds experts: decoder.layers.1.mlp.experts.linear_fc1.weight\n"
                                 "hint: leave --moe-use-upcycling out"));
}

}  // namespace
}  // namespace megatron
