// Checkpoints between layouts: for every pair, A saves, B loads and saves, A loads and saves again;
// the result equals A's first checkpoint byte for byte, in the files and in the memory of every
// rank, including optimizer states.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/planning/checkpoint_plan.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

struct LayoutRow {
  const char* name;
  int ranks;
  const char* flags;
};

// Worlds that do not divide one another, every axis, sharding and plain copies, uneven stages, and
// vocabularies of 101 tokens that are padded to 101, 102, 104, 108, 112 and 128 rows. The last one
// divides a head of its own over the stages: models whose head is tied leave it out.
constexpr LayoutRow kLayouts[] = {
    {"one", 1, "--make-vocab-size-divisible-by 1"},
    {"tp2_sp_dp3", 6,
     "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 8"},
    {"tp3", 3, "--tensor-model-parallel-size 3 --make-vocab-size-divisible-by 4"},
    {"pp2_uneven", 2,
     "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
     "--make-vocab-size-divisible-by 128"},
    {"pp2_vpp2", 2,
     "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--make-vocab-size-divisible-by 1"},
    {"pp2_zbv", 2,
     "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --make-vocab-size-divisible-by 2"},
    {"pp3_layout", 3,
     "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|ttt|L "
     "--make-vocab-size-divisible-by 16"},
    {"cp2", 2, "--context-parallel-size 2 --make-vocab-size-divisible-by 1"},
    {"dp3_zero1", 3,
     "--use-distributed-optimizer --ddp-bucket-size 700 --make-vocab-size-divisible-by 1"},
    {"dp5_zero1", 5,
     "--use-distributed-optimizer --overlap-grad-reduce --make-vocab-size-divisible-by 2"},
    {"dp2_zero2", 2,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
     "--make-vocab-size-divisible-by 1"},
    {"dp4_zero3", 4,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--make-vocab-size-divisible-by 2"},
    {"dp4_instances2", 4,
     "--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
     "--make-vocab-size-divisible-by 1"},
    {"tp2_dp3_zero3", 6,
     "--tensor-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy "
     "optim_grads_params "
     "--make-vocab-size-divisible-by 1"},
    {"tp2_pp2_dp2_zero1", 8,
     "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
     "--use-distributed-optimizer --make-vocab-size-divisible-by 8"},
    {"tp2_pp2_vocab", 4,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-vocab-parallel "
     "--make-vocab-size-divisible-by 7"},
};

// The same for models with experts, whose tensor ranks need sequence parallelism.
constexpr LayoutRow kExpertLayouts[] = {
    {"one", 1, ""},
    {"ep2", 2, "--expert-model-parallel-size 2"},
    {"ep4_zero1", 4, "--expert-model-parallel-size 4 --use-distributed-optimizer"},
    {"tp2_sp_ep2_etp1", 2,
     "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
     "--expert-tensor-parallel-size 1"},
    {"ep2_etp2_zero1", 8,
     "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --use-distributed-optimizer"},
    {"ep2_pp2", 4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"},
    {"ep2_cp2_dp2_zero3", 4,
     "--expert-model-parallel-size 2 --context-parallel-size 2 --use-megatron-fsdp "
     "--data-parallel-sharding-strategy optim_grads_params"},
    {"tp2_sp_etp2_zero2", 4,
     "--tensor-model-parallel-size 2 --sequence-parallel --use-megatron-fsdp "
     "--data-parallel-sharding-strategy optim_grads"},
};

// The same for encoder-decoders.
constexpr LayoutRow kEncoderDecoderLayouts[] = {
    {"one", 1, "--make-vocab-size-divisible-by 1"},
    {"tp2_sp_dp2_zero1", 4,
     "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
     "--make-vocab-size-divisible-by 8"},
    {"dp3_zero3", 3,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--make-vocab-size-divisible-by 2"},
    {"pp3", 3,
     "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Eee|eet|L "
     "--make-vocab-size-divisible-by 16"},
    {"pp2_vpp2", 2,
     "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Eee|e|et|L "
     "--make-vocab-size-divisible-by 4"},
    {"tp2", 2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 2"},
    {"dp2_zero2", 2,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
     "--make-vocab-size-divisible-by 1"},
    {"tp2_pp2_dp2_zero1", 8,
     "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
     "--pipeline-model-parallel-layout Eeee|etL --make-vocab-size-divisible-by 8"},
};

// The same for models with states: heads over two and over eight ranks, which are more than groups.
constexpr LayoutRow kStateLayouts[] = {
    {"one", 1, "--make-vocab-size-divisible-by 1"},
    {"tp2_sp", 2,
     "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 8"},
    {"tp8", 8, "--tensor-model-parallel-size 8 --make-vocab-size-divisible-by 4"},
    {"pp3", 3, "--pipeline-model-parallel-size 3 --make-vocab-size-divisible-by 16"},
    {"cp2_dp2_zero3", 4,
     "--context-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy "
     "optim_grads_params --make-vocab-size-divisible-by 2"},
};

// The same for models that read neighbours, from their second layer of four on.
constexpr LayoutRow kRetroLayouts[] = {
    {"one", 1, "--make-vocab-size-divisible-by 1"},
    {"tp2_sp_dp2_zero1", 4,
     "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
     "--make-vocab-size-divisible-by 8"},
    {"dp3_zero3", 3,
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--make-vocab-size-divisible-by 2"},
    {"pp3_layout", 3,
     "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|tt|tL "
     "--make-vocab-size-divisible-by 16"},
    {"pp2_zbv", 2,
     "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --make-vocab-size-divisible-by 4"},
};

// The same for models with encoders, which tensor ranks have whole or divide.
constexpr LayoutRow kMediaLayouts[] = {
    {"one", 1, "--make-vocab-size-divisible-by 1"},
    {"tp2_divided", 2,
     "--tensor-model-parallel-size 2 --encoder-tensor-model-parallel-size 2 "
     "--make-vocab-size-divisible-by 8"},
    {"tp2_sp_dp2_zero3", 4,
     "--tensor-model-parallel-size 2 --sequence-parallel --use-megatron-fsdp "
     "--data-parallel-sharding-strategy optim_grads_params --make-vocab-size-divisible-by 2"},
    {"tp2_sp_divided_dp2_zero1", 4,
     "--tensor-model-parallel-size 2 --sequence-parallel --encoder-tensor-model-parallel-size 2 "
     "--use-distributed-optimizer --make-vocab-size-divisible-by 4"},
    {"pp3_encoders_apart", 3,
     "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout V|V|Et*4L "
     "--make-vocab-size-divisible-by 2"},
    {"encoders_of_tp2_beside_dp2_zero1", 4,
     "--encoder-tensor-model-parallel-size 2 --encoder-data-parallel-size 1 "
     "--use-distributed-optimizer --make-vocab-size-divisible-by 2"},
};

struct ModelRow {
  const char* name;
  const char* flags;
  size_t every;  // of how many layouts one is taken
  std::span<const LayoutRow> layouts = kLayouts;
};

constexpr ModelRow kModels[] = {
    {"llama",
     "--group-query-attention --num-query-groups 6 --position-embedding-type rope --normalization "
     "RMSNorm --swiglu "
     "--disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights",
     1},
    {"tied", "--max-position-embeddings 16", 2},
    {"experts",
     "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
     "--num-experts 4 --moe-ffn-hidden-size 12 --moe-layer-freq ([0]+[1])*2 "
     "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
     "--moe-shared-expert-intermediate-size 12 --moe-token-dispatcher-type alltoall",
     1, kExpertLayouts},
    {"t5", "--task t5 --decoder-num-layers 1 --decoder-seq-length 12", 1, kEncoderDecoderLayouts},
    {"bert", "--task bert --max-position-embeddings 16", 2},
    {"states",
     "--hybrid-layer-pattern MG*-M- --num-layers 6 --ffn-hidden-size 32 --num-attention-heads 8 "
     "--group-query-attention --num-query-groups 2 --position-embedding-type rope "
     "--attention-output-gate --normalization RMSNorm --swiglu --disable-bias-linear "
     "--untie-embeddings-and-output-weights --mamba-num-heads 8 --mamba-head-dim 6 "
     "--mamba-state-dim 4 --mamba-num-groups 2 --linear-num-key-heads 8 "
     "--linear-num-value-heads 16 --linear-key-head-dim 3 --linear-value-head-dim 2",
     1, kStateLayouts},
    {"retro",
     "--task retro --retro-layers 2 4 --retro-chunk-length 4 --retro-encoder-num-layers 1 "
     "--max-position-embeddings 16",
     1, kRetroLayouts},
    {"media",
     "--task mimo --position-embedding-type rope --untie-embeddings-and-output-weights "
     "--vision-model-type internvit --img-h 8 --img-w 8 --patch-dim 2 --pixel-shuffle "
     "--disable-vision-class-token --vision-activation gelu --image-token-id 100 "
     "--vision-num-layers 2 --vision-hidden-size 16 --vision-ffn-hidden-size 24 "
     "--vision-num-attention-heads 2 --audio-model-type whisper --audio-num-layers 2 "
     "--audio-hidden-size 16 --audio-ffn-hidden-size 24 --audio-num-attention-heads 2 "
     "--audio-mel-bins 4 --audio-token-id 500",
     1, kMediaLayouts},
};

const ModelRow& model_row(std::string_view name) {
  return *std::ranges::find(kModels, name,
                            [](const ModelRow& row) { return std::string_view(row.name); });
}

constexpr const char* kCommon =
    "--num-layers 4 --hidden-size 24 --ffn-hidden-size 36 --num-attention-heads 6 --kv-channels 4 "
    "--seq-length 16 "
    "--tokenizer-type NullTokenizer --vocab-size 101 --mock-data --num-workers 0 "
    "--micro-batch-size 1 "
    "--train-samples 1000 --lr 1e-2 --clip-grad 1.0 --bf16 --eval-iters 0 --device cpu";

class ScratchFolder {
 public:
  ScratchFolder() {
    const fs::path base =
        ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
    std::string name = (base / "megatron_layouts_XXXXXX").string();
    MEGATRON_CHECK(::mkdtemp(name.data()) != nullptr, "cannot make a scratch folder");
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

// One rank of a layout: its model and optimizer, which it trains, saves and loads as a run does.
class Rank {
 public:
  Rank(const Arguments& arguments, const ParallelGroups& groups, Agreement& agreement)
      : arguments_(arguments), groups_(groups), agreement_(agreement), task_(find_task(arguments)) {
    const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
    const Vocabulary vocabulary = vocabulary_of(arguments, *tokenizer);
    datasets_ = build_datasets(task_, arguments, *tokenizer);
    model_ = build_model(task_, arguments, vocabulary, groups, model_dtype(arguments.optimizer),
                         at::kCPU, StartPoint{});
  }

  void train(int steps) {
    const std::unique_ptr<DataLoader> loader = make_train_loader(
        arguments_, groups_, datasets_.train, state_.consumed_train_samples, at::kCPU);
    BatchMaker batches(at::kCPU, groups_.cp, /*row_multiple=*/0,
                       task_.addition(model_.chunks.front().module->config()));
    Timers timers(0);
    for (int i = 0; i < steps; ++i) {
      const StepOptions options = step_options(arguments_, state_.consumed_train_samples);
      train_step(model_, task_, options, [&] { return batches.make(loader->next()); }, timers);
      ++state_.iteration;
      state_.consumed_train_samples += options.global_batch_size;
    }
    state_.task = task_.name;
  }

  void save(const fs::path& folder) {
    Arguments arguments = arguments_;
    arguments.training.save = folder.string();
    TrainingLog log(arguments.training, RunFacts{});
    Timers timers(0);
    state_.step = model_.optimizer->read_state();
    state_.schedule = model_.optimizer->schedule();
    // What holds the weights says of which type they are.
    Checkpointer(arguments, model_, log, timers, {{"config.yaml", ""}}, /*replace_existing=*/false,
                 &agreement_)
        .save(state_);
  }

  // Whatever the tensors held before is gone first.
  void load(const fs::path& folder) {
    for (const StateTensor& entry : tensors()) entry.data.fill_(-77.0);
    const Checkpoint checkpoint(find_checkpoints(folder).at(0).directory);
    state_ = run_state_from_json(checkpoint.state(), folder.string());
    load_model_state(checkpoint, state_, arguments_.optimizer, model_, {/*optimizer=*/true},
                     &agreement_);
  }

  // Everything that this rank holds, copies and padding included.
  std::map<std::string, at::Tensor> memory() const {
    std::map<std::string, at::Tensor> out;
    for (const StateTensor& entry : tensors()) out[entry.description.key] = entry.data.clone();
    return out;
  }

 private:
  std::vector<StateTensor> tensors() const {
    std::vector<StateTensor> all = model_.optimizer->tensors();
    for (const ModelChunk& chunk : model_.chunks)
      for (StateTensor& entry : chunk.store->state()) all.push_back(std::move(entry));
    return all;
  }

  const Arguments& arguments_;
  const ParallelGroups& groups_;
  Agreement& agreement_;
  const PretrainTask task_;
  TrainValidTestDatasets datasets_;
  TrainedModel model_;
  RunState state_;
};

Arguments arguments_of(const LayoutRow& layout, const std::string& model_flags, int seed) {
  return parse_run(cat(kCommon, " ", model_flags, " ", layout.flags, " --seed ", seed,
                       " --global-batch-size ", 4 * layout.ranks),
                   layout.ranks);
}

void run_layout(const LayoutRow& layout, const std::string& model_flags, int seed,
                const std::function<void(Rank&, int rank)>& body) {
  const Arguments arguments = arguments_of(layout, model_flags, seed);
  ThreadAgreement::Room room(layout.ranks);
  run_ranks(layout.ranks, [&](const std::shared_ptr<Backend>& world) {
    at::set_num_threads(1);
    const ParallelGroups groups =
        make_parallel_groups(arguments.parallel, arguments.encoder_ranks(), world);
    ThreadAgreement agreement(room, world->rank());
    Rank rank(arguments, groups, agreement);
    body(rank, world->rank());
  });
}

using Memory = std::map<std::string, at::Tensor>;

std::string difference(const Memory& before, const Memory& after) {
  if (before.size() != after.size()) return "other tensors";
  for (const auto& [name, tensor] : before) {
    const auto found = after.find(name);
    if (found == after.end()) return name + " is gone";
    const at::Tensor &a = tensor, &b = found->second;
    if (a.sizes() != b.sizes() ||
        (a.nbytes() > 0 && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) != 0))
      return name;
  }
  return "";
}

// The manifest without the time of the save.
std::string timeless_manifest(const fs::path& checkpoint) {
  Manifest manifest = parse_manifest(read_file(checkpoint / kManifestName), checkpoint.string());
  manifest.created.clear();
  return encode_manifest(manifest);
}

std::string difference_of_files(const fs::path& before, const fs::path& after) {
  const fs::path a = find_checkpoints(before).at(0).directory,
                 b = find_checkpoints(after).at(0).directory;
  size_t compared = 0, present = 0;
  for (const auto& entry : fs::directory_iterator(b)) present += entry.is_regular_file();
  for (const auto& entry : fs::directory_iterator(a)) {
    const std::string name = entry.path().filename().string();
    ++compared;
    if (!fs::exists(b / name)) return name + " is gone";
    const bool same = name == kManifestName ? timeless_manifest(a) == timeless_manifest(b)
                                            : read_file(a / name) == read_file(b / name);
    if (!same) return name;
  }
  return compared > 1 && compared == present ? "" : "other files";
}

class CheckpointLayouts : public testing::TestWithParam<ModelRow> {};

TEST_P(CheckpointLayouts, ThereAndBackIsTheSame) {
  const ScratchFolder scratch;
  set_quiet(true);
  std::vector<LayoutRow> layouts;
  for (size_t i = 0; i < GetParam().layouts.size(); i += GetParam().every)
    layouts.push_back(GetParam().layouts[i]);
  const size_t count = layouts.size();
  const auto folder = [&](size_t a) { return scratch / layouts[a].name; };
  const auto folder_by = [&](size_t a, size_t b) {
    return scratch / cat(layouts[a].name, "_by_", layouts[b].name);
  };
  // Every layout trains a model of its own, so that nobody finds in memory what it should have
  // read.
  std::vector<std::vector<Memory>> memories;
  for (size_t a = 0; a < count; ++a) {
    memories.emplace_back(layouts[a].ranks);
    run_layout(layouts[a], GetParam().flags, static_cast<int>(100 + a), [&](Rank& rank, int i) {
      rank.train(2);
      memories[a][i] = rank.memory();
      rank.save(folder(a));
    });
  }
  // `megatron check` knows who writes what.
  for (size_t a = 0; a < count; ++a) {
    SCOPED_TRACE(layouts[a].name);
    const Arguments arguments = arguments_of(layouts[a], GetParam().flags, 1);
    const LayoutPlan plan = make_layout_plan(
        arguments, {101, padded_vocab_size(arguments.tokenizer, 101, arguments.vocabulary_ranks())},
        /*on_gpu=*/false, find_task(arguments).model_provider);
    const CheckpointPlan planned = make_checkpoint_plan(plan);
    const fs::path checkpoint = find_checkpoints(folder(a)).at(0).directory;
    const Manifest manifest =
        parse_manifest(read_file(checkpoint / kManifestName), checkpoint.string());
    std::vector<int64_t> written(planned.bytes.size(), 0);
    int64_t fragments = 0;
    for (const auto& [name, tensor] : manifest.tensors) {
      for (const Fragment& fragment : tensor.fragments) {
        const std::string& file = manifest.files[static_cast<size_t>(fragment.file)].name;
        ASSERT_TRUE(file.starts_with("rank_"));
        written[std::stoul(file.substr(5))] +=
            (fragment.flat_end - fragment.flat_begin) * size_of(tensor.dtype);
        ++fragments;
      }
    }
    EXPECT_EQ(planned.bytes, written);
    EXPECT_GE(fragments, planned.fragments);  // a gated weight has two in one file
    EXPECT_EQ(planned.files, std::count_if(written.begin(), written.end(),
                                           [](int64_t bytes) { return bytes > 0; }));
  }
  for (size_t b = 0; b < count; ++b) {
    run_layout(layouts[b], GetParam().flags, 1, [&](Rank& rank, int) {
      for (size_t a = 0; a < count; ++a) {
        rank.load(folder(a));
        rank.save(folder_by(a, b));
      }
    });
  }
  for (size_t a = 0; a < count; ++a) {
    std::vector<std::vector<std::string>> differences(count,
                                                      std::vector<std::string>(layouts[a].ranks));
    const auto again = [&](size_t b) {
      return scratch / cat(layouts[a].name, "_again_", layouts[b].name);
    };
    run_layout(layouts[a], GetParam().flags, 2, [&](Rank& rank, int i) {
      for (size_t b = 0; b < count; ++b) {
        rank.load(folder_by(a, b));
        differences[b][i] = difference(memories[a][i], rank.memory());
        rank.save(again(b));
      }
    });
    for (size_t b = 0; b < count; ++b) {
      SCOPED_TRACE(cat(layouts[a].name, " -> ", layouts[b].name, " -> ", layouts[a].name));
      for (const std::string& text : differences[b]) EXPECT_EQ(text, "");
      EXPECT_EQ(difference_of_files(folder(a), again(b)), "");
    }
  }
  set_quiet(false);
}

// From layout to layout, each of which saves what it read of the one before: 1, 2, 8 and 3 ranks,
// and back.
TEST(Checkpoints, OfStatesPassThroughLayoutsInEveryBit) {
  const ScratchFolder scratch;
  set_quiet(true);
  const ModelRow& model = model_row("states");
  Memory trained, returned;
  run_layout(kStateLayouts[0], model.flags, 5, [&](Rank& rank, int) {
    rank.train(2);
    trained = rank.memory();
    rank.save(scratch / "0");
  });
  int visited = 0;
  for (const size_t layout : {1, 2, 3, 0}) {
    run_layout(kStateLayouts[layout], model.flags, 6, [&](Rank& rank, int) {
      rank.load(scratch / cat(visited));
      rank.save(scratch / cat(visited + 1));
      if (layout == 0) returned = rank.memory();
    });
    ++visited;
  }
  size_t moments = 0;
  for (const auto& [name, tensor] : trained)
    moments += name.find("exp_avg") != name.npos && name.find("A_log") != name.npos;
  EXPECT_EQ(moments, 6u) << "two of each of three layers";
  EXPECT_EQ(difference(trained, returned), "");
  EXPECT_EQ(difference_of_files(scratch / "0", scratch / "4"), "");
  set_quiet(false);
}

// A run that was stopped and goes on ends with the bytes of one that was not.
TEST(Resumed, RunOfExpertsHasTheSameBits) {
  const ScratchFolder scratch;
  set_quiet(true);
  const ModelRow& model = model_row("experts");
  for (const LayoutRow& layout : {kExpertLayouts[1], kExpertLayouts[2]}) {
    SCOPED_TRACE(layout.name);
    std::vector<Memory> whole(layout.ranks), halves(layout.ranks);
    run_layout(layout, model.flags, 7, [&](Rank& rank, int i) {
      rank.train(4);
      whole[i] = rank.memory();
    });
    const fs::path folder = scratch / layout.name;
    run_layout(layout, model.flags, 7, [&](Rank& rank, int) {
      rank.train(2);
      rank.save(folder);
    });
    run_layout(layout, model.flags, 7, [&](Rank& rank, int i) {
      rank.load(folder);
      rank.train(2);
      halves[i] = rank.memory();
    });
    for (int i = 0; i < layout.ranks; ++i) EXPECT_EQ(difference(whole[i], halves[i]), "");
  }
  set_quiet(false);
}

INSTANTIATE_TEST_SUITE_P(Models, CheckpointLayouts, testing::ValuesIn(kModels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
