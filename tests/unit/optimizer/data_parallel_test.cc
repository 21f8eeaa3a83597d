// Every way to shard gradients, optimizer states and parameters over data ranks trains as one rank
// does.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/nn/placement.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/optimizer/update_rules.h"
#include "tests/unit/forwarding_backend.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

constexpr int64_t kLayers = 4;
constexpr int64_t kGlobalBatch = 12;  // of one step, over all ranks
constexpr int kParallelSteps = 3;

// Layers [first, last) of a chain. The first chunk has the embedding, the last one the head, which
// uses the embedding's table too: the same parameter, of this chunk or of `tied`, or a copy on
// another stage. Every layer has a parameter that keeps fp32.
class ChainModel : public TestModel {
 public:
  ChainModel(int64_t first, int64_t last, const ParallelGroups& groups, const ProcessGroup* shared,
             ChainModel* tied)
      : groups_(groups) {
    const bool embedding = first == 0, head = last == kLayers;
    if (embedding) add_table(shared == nullptr ? 2 : 1, shared);
    if (embedding)
      parameter("embedding.position_embeddings.weight", {7, 6}, ParameterRole::kEmbedding);
    for (int64_t i = first; i < last; ++i) {
      const std::string layer = cat("decoder.layers.", i, ".");
      Parameter& norm = parameter(layer + "norm.weight", {6}, ParameterRole::kNorm);
      norm.placement.partial_grad.insert(Axis::kTensor);
      parameter(layer + "fc.weight", {10, 60}, ParameterRole::kWeight, {6, 4});
      parameter(layer + "fc.bias", {10}, ParameterRole::kBias, {6, 4});
      Parameter& proj = parameter(layer + "proj.weight", {6, 10});
      proj.placement.shards.push_back({1, Axis::kTensor, {}});
      proj.local_shape[1] /= groups.tp.size();
      proj.lr_factor = 2.0;
      parameter(layer + "decay", {10}, ParameterRole::kWeight, {6, 4}).keeps_fp32 = true;
      if (i == 1) parameter(layer + "frozen", {5, 5}).trainable = false;
      if (i == 3) {
        Parameter& frozen = parameter(layer + "frozen_decay", {5});
        frozen.keeps_fp32 = true;
        frozen.trainable = false;
      }
      if (i == 2) parameter(layer + "unused", {3, 3});
    }
    if (head) {
      Parameter& norm = parameter("decoder.final_norm.weight", {6}, ParameterRole::kNorm);
      norm.placement.partial_grad.insert(Axis::kTensor);
    }
    if (head && shared != nullptr) add_table(1, shared);
    if (head && shared == nullptr) head_table_ = embedding ? &(*this)[0] : &(*tied)[0];
    head_only_ = head && !embedding;
  }

  // One micro-batch: values in the order of the model, then gradients in reverse. The gradient of
  // an element depends on its value and on the sample alone.
  void pass(int64_t sample) {
    std::vector<Parameter*> order = parameters();
    if (head_table_ != nullptr) order.push_back(head_table_);
    for (Parameter* parameter : order) {
      const at::Tensor value = parameter->store->acquire(*parameter);
      EXPECT_EQ(value.sizes(), at::IntArrayRef(parameter->local_shape));
      parameter->store->release(*parameter);
    }
    for (size_t k = order.size(); k-- > 0;) {
      if (order[k]->name.ends_with("unused")) continue;
      const bool second_use =
          order[k]->name == table() && (head_only_ || (k > 0 && k + 1 == order.size()));
      if (order[k]->trainable) add_gradient(*order[k], static_cast<double>(sample), second_use);
    }
  }

 private:
  static const char* table() { return "embedding.word_embeddings.weight"; }

  Parameter& parameter(const std::string& name, std::vector<int64_t> shape,
                       ParameterRole role = ParameterRole::kWeight,
                       std::vector<int64_t> parts = {}) {
    Parameter& made = declare(name, shape, role);
    made.name = name;
    made.init = Init::normal(0.5);
    if (!parts.empty()) {
      made.placement.shards.push_back({0, Axis::kTensor, parts});
      made.local_shape[0] /= groups_.tp.size();
    }
    return made;
  }

  void add_table(int uses, const ProcessGroup* shared) {
    Parameter& made = parameter(table(), {24, 6}, ParameterRole::kEmbedding, {24});
    made.valid_rows = 21;
    made.uses = uses;
    made.shared = shared;
  }

  void add_gradient(Parameter& parameter, double sample, bool second_use) {
    double weight = second_use ? 0.3 : 1.0;
    if (parameter.placement.partial_grad.contains(Axis::kTensor) && groups_.tp.size() > 1)
      weight *= groups_.tp.rank() == 0 ? -1.0 : 2.0;
    const at::Tensor value = parameter.store->acquire(parameter);
    // Padded rows are zero
    const at::Tensor gradient = at::cos(value * 3.0 + sample) * (value != 0) * weight;
    // A position that no sample has
    if (parameter.name == "embedding.position_embeddings.weight") gradient[0].zero_();
    const GradTarget target = parameter.store->grad_target(parameter);
    target.to_add_to().add_(gradient);
    parameter.store->release(parameter);
    parameter.store->grad_ready(parameter);
  }

  const ParallelGroups& groups_;
  Parameter* head_table_ = nullptr;  // used again
  bool head_only_ = false;
};

struct Layout {
  int tp = 1, pp = 1, dp = 1, cp = 1;
  int chunks = 1;  // per rank
  DistributedDataParallelConfig data;
  int ranks() const { return tp * pp * dp * cp; }
};

OptimizerConfig optimizer_config() {
  OptimizerConfig config;
  config.lr = 1e-2;
  config.lr_decay_style = LrDecayStyle::kCosine;
  config.weight_decay = 0.1;
  config.clip_grad = 0.5;
  return config;
}

// One rank of a run, updated by the rule of the configuration or by another one.
struct TrainingRank {
  TrainingRank(const Layout& layout, const std::shared_ptr<Backend>& world,
               at::ScalarType dtype = at::kDouble,
               const OptimizerConfig& config = optimizer_config(),
               const UpdateRule* rule = nullptr) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = layout.tp;
    parallel.pipeline_model_parallel_size = layout.pp;
    parallel.context_parallel_size = layout.cp;
    groups = make_parallel_groups(parallel, world);
    const DataParallelGroups data = make_data_parallel_groups(groups, layout.data);
    const int segments = layout.pp * layout.chunks;
    for (int chunk = 0; chunk < layout.chunks; ++chunk) {
      const int segment = chunk * layout.pp + groups.pp.rank();
      const bool shared = layout.pp > 1;
      models.push_back(std::make_unique<ChainModel>(
          kLayers * segment / segments, kLayers * (segment + 1) / segments, groups,
          shared ? &groups.embd : nullptr, models.empty() ? nullptr : models.front().get()));
      stores.push_back(std::make_unique<DistributedDataParallel>(*models.back(), groups, dtype,
                                                                 at::kCPU, layout.data, data));
      stores.back()->initialize(11);
    }
    std::vector<DistributedDataParallel*> all;
    for (const auto& store : stores) all.push_back(store.get());
    optimizer =
        std::make_unique<Optimizer>(rule != nullptr ? *rule : update_rule(config), config,
                                    make_schedule(config, {100, std::nullopt, kGlobalBatch}), all);
  }

  void train_step(int step) {
    const int64_t mine = kGlobalBatch / groups.dp_cp.size();
    for (const auto& store : stores) store->zero_grad(mine);
    for (int64_t i = 0; i < mine; ++i) {
      const int64_t sample = step * kGlobalBatch + groups.dp_cp.rank() * mine + i;
      for (const auto& model : models) model->pass(sample);
    }
    for (const auto& store : stores) store->finish_grad_sync();
    optimizer->step(static_cast<double>(kGlobalBatch), kGlobalBatch);
  }

  void train(int first_step, int last_step) {
    for (int step = first_step; step < last_step; ++step) {
      train_step(step);
      zeros = optimizer->num_zeros();
      norms.push_back(optimizer->read_state().grad_norm);
      EXPECT_LT(optimizer->read_state().clip_coefficient, 1.0);
    }
    params_norm = optimizer->params_norm();
  }

  // Local values by name.
  std::map<std::string, at::Tensor> values() {
    std::map<std::string, at::Tensor> all;
    for (const auto& store : stores)
      store->edit_values(
          [&](Parameter& parameter) { all[parameter.name] = parameter.value.clone(); });
    return all;
  }

  std::vector<StateTensor> state() {
    std::vector<StateTensor> all = optimizer->tensors();
    for (const auto& store : stores) {
      for (StateTensor& entry : store->state()) all.push_back(std::move(entry));
    }
    return all;
  }

  Parameter& named(const std::string& name) {
    for (const auto& model : models) {
      for (Parameter* parameter : model->parameters()) {
        if (parameter->name == name) return *parameter;
      }
    }
    throw_error(cat("no parameter ", name));
  }

  ParallelGroups groups;
  std::vector<std::unique_ptr<ChainModel>> models;
  std::vector<std::unique_ptr<DistributedDataParallel>> stores;
  std::unique_ptr<Optimizer> optimizer;
  std::vector<double> norms;
  double zeros = 0, params_norm = 0;
};

struct Serial {
  std::map<std::string, at::Tensor> values;
  std::vector<double> norms;
  double zeros, params_norm;
};

Serial train_serial(const UpdateRule* rule) {
  TrainingRank run({}, nullptr, at::kDouble, optimizer_config(), rule);
  run.train(0, kParallelSteps);
  return Serial{run.values(), run.norms, run.zeros, run.params_norm};
}

const Serial& serial() {
  static const Serial result = train_serial(nullptr);
  return result;
}

void expect_serial(TrainingRank& run, const Serial& serial) {
  for (int step = 0; step < kParallelSteps; ++step)
    EXPECT_NEAR(run.norms[step], serial.norms[step], 1e-12 * serial.norms[step]);
  EXPECT_EQ(run.zeros, serial.zeros);
  EXPECT_EQ(run.zeros, 6 + 9) << "a position, and the unused parameter";
  EXPECT_NEAR(run.params_norm, serial.params_norm, 1e-12 * serial.params_norm);
  for (const auto& [name, local] : run.values()) {
    for (const ShardPiece& piece : shard_pieces(run.named(name), run.groups)) {
      at::Tensor whole = serial.values.at(name), part = local;
      for (size_t d = 0; d < piece.local_offset.size(); ++d) {
        const auto dim = static_cast<int64_t>(d);
        whole = whole.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
        part = part.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
      }
      EXPECT_LE((whole - part).abs().max().item<double>(), 1e-12) << name;
    }
  }
  const at::Tensor table = run.values()["embedding.word_embeddings.weight"];
  if (table.defined() && run.groups.tp.rank() + 1 == run.groups.tp.size()) {
    EXPECT_EQ(at::count_nonzero(table.narrow(0, table.size(0) - 3, 3)).item<int64_t>(), 0)
        << "padded rows";
  }
}

DistributedDataParallelConfig strategy(ShardingStrategy sharding, bool overlap) {
  DistributedDataParallelConfig config;
  config.use_megatron_fsdp = sharding != ShardingStrategy::kNoShard;
  config.data_parallel_sharding_strategy = sharding;
  config.overlap_grad_reduce = overlap;
  config.overlap_param_gather = overlap && config.use_megatron_fsdp;
  if (sharding != ShardingStrategy::kOptimGradsParams) config.ddp_bucket_size = 100;
  return config;
}

constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::kNoShard, ShardingStrategy::kOptim,
                                            ShardingStrategy::kOptimGrads,
                                            ShardingStrategy::kOptimGradsParams};

void expect_all_strategies_serial(Layout layout, const UpdateRule* rule = nullptr,
                                  const Serial& expected = serial()) {
  for (const ShardingStrategy sharding : kStrategies) {
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(cat("tp ", layout.tp, " pp ", layout.pp, " dp ", layout.dp, " cp ", layout.cp,
                       " chunks ", layout.chunks, " strategy ", static_cast<int>(sharding),
                       " overlap ", overlap));
      const int64_t instances = layout.data.num_distributed_optimizer_instances;
      Layout with = layout;
      with.data = strategy(sharding, overlap);
      if (sharding != ShardingStrategy::kNoShard)
        with.data.num_distributed_optimizer_instances = instances;
      with.data.whole_matrices = rule != nullptr && rule->needs_whole_matrices();
      run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
        TrainingRank run(with, world, at::kDouble, optimizer_config(), rule);
        run.train(0, kParallelSteps);
        expect_serial(run, expected);
      });
    }
  }
}

Layout mesh(int tp, int pp, int dp, int cp = 1, int chunks = 1) {
  Layout layout;
  layout.tp = tp, layout.pp = pp, layout.dp = dp, layout.cp = cp, layout.chunks = chunks;
  return layout;
}

TEST(DataParallel, EveryStrategyTrainsAsOneRank) {
  for (const int dp : {1, 2, 3, 4}) expect_all_strategies_serial(mesh(1, 1, dp));
}

TEST(DataParallel, WithTensorAndContextRanks) {
  expect_all_strategies_serial(mesh(2, 1, 1));
  expect_all_strategies_serial(mesh(2, 1, 2));
  expect_all_strategies_serial(mesh(1, 1, 2, 2));
  expect_all_strategies_serial(mesh(2, 1, 3));
}

TEST(DataParallel, WithStagesThatShareTheEmbedding) {
  expect_all_strategies_serial(mesh(1, 2, 1));
  expect_all_strategies_serial(mesh(1, 3, 2));
  expect_all_strategies_serial(mesh(2, 2, 2));
}

TEST(DataParallel, SeveralChunksOnOneRank) {
  expect_all_strategies_serial(mesh(1, 1, 1, 1, 3));
  expect_all_strategies_serial(mesh(1, 1, 2, 1, 2));
  expect_all_strategies_serial(mesh(1, 2, 2, 1, 2));
}

TEST(DataParallel, ShardsInsideInstances) {
  Layout layout = mesh(1, 1, 4);
  layout.data.num_distributed_optimizer_instances = 2;
  expect_all_strategies_serial(layout);
  layout = mesh(2, 1, 2, 2);
  layout.data.num_distributed_optimizer_instances = 2;
  expect_all_strategies_serial(layout);
  layout = mesh(1, 2, 2);
  layout.data.num_distributed_optimizer_instances = 2;
  expect_all_strategies_serial(layout);
}

// A checkpoint in memory: every element once, from whichever rank writes it. Elements are doubles,
// which hold every type.
class Stored {
 public:
  void write(const std::vector<StateTensor>& state) {
    const std::lock_guard lock(mutex_);
    for (const StateTensor& entry : state) {
      Whole& whole = tensors_[entry.description.key];
      const size_t size =
          static_cast<size_t>(Box{{}, entry.description.global_shape}.num_elements());
      if (whole.data.empty()) whole = {std::vector<double>(size, 0.0), std::vector<int>(size, 0)};
      if (entry.description.replica_id != 0) continue;
      const at::Tensor local = entry.data.to(at::kDouble);
      for_each_element(entry, [&](int64_t global, int64_t at) {
        whole.data[static_cast<size_t>(global)] = local.const_data_ptr<double>()[at];
        ++whole.writers[static_cast<size_t>(global)];
      });
    }
  }
  void read(const std::vector<StateTensor>& state) const {
    for (const StateTensor& entry : state) {
      const std::vector<double>& whole = tensors_.at(entry.description.key).data;
      const at::Tensor local = at::zeros_like(entry.data, at::kDouble);
      for_each_element(entry, [&](int64_t global, int64_t at) {
        local.mutable_data_ptr<double>()[at] = whole[static_cast<size_t>(global)];
      });
      entry.data.copy_(local);
    }
  }
  void expect_each_element_once() const {
    for (const auto& [key, whole] : tensors_) {
      EXPECT_TRUE(std::all_of(whole.writers.begin(), whole.writers.end(), [](int n) {
        return n == 1;
      })) << key;
    }
  }
  bool operator==(const Stored& other) const {
    return std::equal(tensors_.begin(), tensors_.end(), other.tensors_.begin(),
                      other.tensors_.end(), [](const auto& a, const auto& b) {
                        return a.first == b.first && a.second.data == b.second.data;
                      });
  }
  size_t size() const { return tensors_.size(); }

 private:
  struct Whole {
    std::vector<double> data;
    std::vector<int> writers;
  };

  // body(index in the global tensor, index in the data), plain and slow.
  template <class Body>
  static void for_each_element(const StateTensor& entry, const Body& body) {
    const ShardedTensor& d = entry.description;
    ASSERT_EQ(entry.data.numel(), d.flat_end - d.flat_begin);
    for (const ShardPiece& piece : d.pieces) {
      const int64_t count = piece.global.num_elements();
      for (int64_t i = 0; i < count; ++i) {
        int64_t rest = i, local = 0, whole = 0, local_stride = 1, global_stride = 1;
        for (size_t k = d.global_shape.size(); k-- > 0;) {
          const int64_t at = rest % piece.global.shape[k];
          rest /= piece.global.shape[k];
          local += (piece.local_offset[k] + at) * local_stride;
          whole += (piece.global.offset[k] + at) * global_stride;
          local_stride *= d.local_shape[k];
          global_stride *= d.global_shape[k];
        }
        if (local >= d.flat_begin && local < d.flat_end) body(whole, local - d.flat_begin);
      }
    }
  }

  std::mutex mutex_;
  std::map<std::string, Whole> tensors_;
};

// Stored in one layout and loaded in another, nothing changes, and both go on alike.
TEST(DataParallel, StateMovesBetweenLayouts) {
  Layout four = mesh(1, 1, 4);
  four.data = strategy(ShardingStrategy::kOptimGradsParams, true);
  four.data.num_distributed_optimizer_instances = 2;
  Layout tensor = mesh(2, 1, 2);
  tensor.data = strategy(ShardingStrategy::kOptimGrads, false);
  Layout stages = mesh(1, 2, 2, 1, 1);
  stages.data = strategy(ShardingStrategy::kOptim, true);
  Layout three = mesh(1, 1, 3);
  three.data = strategy(ShardingStrategy::kOptimGradsParams, false);
  Layout two = mesh(1, 1, 2);
  two.data = strategy(ShardingStrategy::kOptim, false);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    std::unique_ptr<Stored> before = std::make_unique<Stored>();
    run_ranks(two.ranks(), [&](const std::shared_ptr<Backend>& world) {
      TrainingRank run(two, world, dtype);
      run.train(0, 2);
      before->write(run.state());
    });
    before->expect_each_element_once();
    EXPECT_EQ(before->size(), dtype == at::kDouble ? 26u + 2 * 24 : 26u + 3 * 20 + 2 * 4)
        << "what keeps fp32 has no second master weight";
    for (const Layout& layout : {three, four, tensor, stages, Layout()}) {
      SCOPED_TRACE(cat("tp ", layout.tp, " pp ", layout.pp, " dp ", layout.dp));
      auto after = std::make_unique<Stored>();
      run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
        TrainingRank run(layout, world, dtype);
        before->read(run.state());
        for (const auto& store : run.stores) store->values_changed();
        after->write(run.state());
        for (auto& [name, value] : run.values())
          EXPECT_TRUE(at::count_nonzero(value).item<int64_t>() > 0) << name;
      });
      after->expect_each_element_once();
      EXPECT_TRUE(*before == *after);
      before = std::move(after);
    }
  }
}

// The same through files.
TEST(DataParallel, CheckpointsDoNotDependOnTheSharding) {
  const std::filesystem::path root =
      std::filesystem::path(testing::TempDir()) / cat("data_parallel_", getpid());
  Layout two = mesh(1, 1, 2), three = mesh(1, 1, 3);
  two.data = three.data = strategy(ShardingStrategy::kOptimGradsParams, true);
  Stored before, after;
  std::mutex mutex;
  SaveRequest request;
  request.root = root;
  request.iteration = 2;
  std::vector<at::Tensor> alive;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    TrainingRank run(two, world, at::kBFloat16);
    run.train(0, 2);
    const std::vector<StateTensor> state = run.state();
    before.write(state);
    const std::lock_guard lock(mutex);  // one file for all ranks
    for (const StateTensor& entry : state) {
      alive.push_back(entry.data.clone());
      request.tensors.push_back(entry.description);
      request.tensors.back().data = alive.back().data_ptr();
    }
  });
  const std::filesystem::path directory = save_checkpoint(request).directory;
  run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
    TrainingRank run(three, world, at::kBFloat16);
    const std::vector<StateTensor> state = run.state();
    std::vector<ShardedTensor> wanted;
    for (const StateTensor& entry : state) {
      wanted.push_back(entry.description);
      wanted.back().data = entry.data.data_ptr();
    }
    LoadOptions options;
    options.threads = 1;
    Checkpoint(directory).load(wanted, options);
    for (const auto& store : run.stores) store->values_changed();
    after.write(state);
  });
  EXPECT_TRUE(before == after);
  std::filesystem::remove_all(root);
}

// The state after three steps in bf16, without clipping, because the norm is a sum in another
// order.
std::unique_ptr<Stored> three_steps(const Layout& layout, OptimizerConfig config) {
  config.clip_grad = 0;
  auto stored = std::make_unique<Stored>();
  run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
    TrainingRank run(layout, world, at::kBFloat16, config);
    for (int step = 0; step < 3; ++step) run.train_step(step);
    stored->write(run.state());
  });
  stored->expect_each_element_once();
  return stored;
}

OptimizerConfig narrow_config() {
  OptimizerConfig config = optimizer_config();
  config.bf16 = true;
  config.use_precision_aware_optimizer = true;
  config.main_params_dtype = config.exp_avg_dtype = config.exp_avg_sq_dtype = StateType::kBf16;
  return config;
}

// With sums in one order, dividing the optimizer changes no bit, whatever is rounded by chance.
TEST(DataParallel, ADividedOptimizerGivesTheBitsOfAWholeOne) {
  for (const OptimizerConfig& config : {optimizer_config(), narrow_config()}) {
    Layout whole = mesh(1, 1, 3), divided = whole;
    whole.data = strategy(ShardingStrategy::kNoShard, true);
    divided.data = strategy(ShardingStrategy::kOptim, true);
    EXPECT_TRUE(*three_steps(whole, config) == *three_steps(divided, config));
  }
}

// States in host memory give the bits of states on the device, whatever shares they are divided
// into.
TEST(DataParallel, AnOffloadedOptimizerGivesTheSameBits) {
  for (OptimizerConfig config : {optimizer_config(), narrow_config()}) {
    for (const ShardingStrategy sharding : {ShardingStrategy::kNoShard, ShardingStrategy::kOptim,
                                            ShardingStrategy::kOptimGradsParams}) {
      Layout layout = mesh(2, 1, 2);
      layout.data = strategy(sharding, true);
      config.optimizer_cpu_offload = false;
      const auto plain = three_steps(layout, config);
      config.optimizer_cpu_offload = true;
      for (const double fraction : {1.0, 0.4}) {
        config.optimizer_offload_fraction = fraction;
        EXPECT_TRUE(*plain == *three_steps(layout, config))
            << static_cast<int>(sharding) << " fraction " << fraction;
      }
    }
  }
}

// The gradient of each counts once on one rank, and expect_serial() holds the norms of others
// against that.
TEST(DataParallel, WhatKeepsFp32CountsInTheNorm) {
  TrainingRank run({}, nullptr);
  double sum = 0;
  run.stores[0]->zero_grad(1);
  run.models[0]->pass(3);
  for (Parameter* parameter : run.models[0]->parameters())
    if (parameter->trainable) sum += run.stores[0]->grad(*parameter).square().sum().item<double>();
  run.stores[0]->finish_grad_sync();
  run.optimizer->step(1.0, 1);
  EXPECT_NEAR(run.optimizer->read_state().grad_norm, std::sqrt(sum), 1e-12 * std::sqrt(sum));
}

// In a model in bf16 they are trained as in one in fp32, to the bit, on one rank and on many, and
// survive the way through the state; there, a value that bf16 could hold would be chance.
TEST(DataParallel, WhatKeepsFp32IsNeverRounded) {
  OptimizerConfig config = optimizer_config();
  config.clip_grad = 0;  // the norm has parts in bf16
  const auto decays = [&](const Layout& layout, at::ScalarType dtype) {
    std::map<std::string, at::Tensor> found;
    std::mutex mutex;
    run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
      TrainingRank run(layout, world, dtype, config);
      for (int step = 0; step < 3; ++step) run.train_step(step);
      for (const auto& [name, value] : run.values()) {
        if (!run.named(name).keeps_fp32) {
          EXPECT_EQ(value.scalar_type(), dtype) << name;
          continue;
        }
        EXPECT_EQ(run.named(name).value.scalar_type(), at::kFloat) << name;
        const std::lock_guard lock(mutex);
        if (run.groups.tp.rank() == 0) found[name] = value;
      }
      for (const StateTensor& entry : run.state()) {
        const std::string& key = entry.description.key;
        EXPECT_TRUE(!key.ends_with("decay") || entry.description.dtype == DType::kFloat32) << key;
      }
    });
    return found;
  };
  for (const bool tensor : {false, true}) {
    Layout serial = mesh(tensor ? 2 : 1, 1, 1);
    serial.data.ddp_bucket_size = 100;
    const auto expected = decays(serial, at::kFloat);
    EXPECT_EQ(expected.size(), 5u);
    bool rounding_shows = false;
    for (const auto& [name, value] : expected)
      rounding_shows |= !at::equal(value, value.to(at::kBFloat16).to(at::kFloat));
    EXPECT_TRUE(rounding_shows);
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      for (const auto& [name, value] : decays(serial, dtype))
        EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
    }
  }
  for (const ShardingStrategy sharding : kStrategies) {
    for (const bool peer_copies : {false, true}) {
      Layout layout = mesh(1, 1, 2);
      layout.data = strategy(sharding, true);
      layout.data.peer_copies = peer_copies;
      const auto expected = decays(layout, at::kFloat);
      EXPECT_EQ(expected.size(), 5u);
      for (const auto& [name, value] : decays(layout, at::kBFloat16))
        EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
    }
  }
}

TEST(DataParallel, RoundingByChanceDoesNotDependOnTensorRanksOrChunks) {
  const OptimizerConfig config = narrow_config();
  const std::unique_ptr<Stored> one = three_steps(Layout(), config);
  EXPECT_EQ(one->size(), 26u + 2 * 24) << "no master weights";
  EXPECT_TRUE(*one == *three_steps(mesh(2, 1, 1), config));
  EXPECT_FALSE(*one == *three_steps(Layout(), optimizer_config()));
  EXPECT_TRUE(*one == *three_steps(mesh(1, 1, 1, 1, 2), config));
}

// Steps far below the spacing of bf16 still add up, on the average.
TEST(DataParallel, NarrowWeightsKeepSmallUpdates) {
  OptimizerConfig config = narrow_config();
  config.lr = 1e-5;
  config.lr_decay_style = LrDecayStyle::kConstant;
  config.weight_decay = 0;
  const ParallelGroups groups;
  TestModel model;
  model.declare("weight", {64, 64});
  DistributedDataParallel store(model, groups, at::kBFloat16, at::kCPU);
  model[0].value.fill_(1.0);  // the values below it are 2^-8 apart
  Optimizer optimizer(config, make_schedule(config, {1000, std::nullopt, kGlobalBatch}), store);
  for (int step = 0; step < 200; ++step) {
    store.flat_grads().fill_(1.0);
    optimizer.step(1.0, kGlobalBatch);
  }
  EXPECT_NEAR(1.0 - model[0].value.to(at::kDouble).mean().item<double>(), 200 * 1e-5, 1e-4);
  const at::Tensor squares = optimizer.tensors()[1].data;
  EXPECT_EQ(squares.scalar_type(), at::kBFloat16);
}

// What the owner of a shard writes is what every rank computes with next.
TEST(DataParallel, ChangedValuesAreSeenByAll) {
  for (const ShardingStrategy sharding :
       {ShardingStrategy::kOptim, ShardingStrategy::kOptimGradsParams}) {
    for (const bool overlap : {false, true}) {
      Layout layout = mesh(1, 1, 2);
      layout.data = strategy(sharding, overlap);
      run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
        TrainingRank run(layout, world);
        DistributedDataParallel& store = *run.stores[0];
        Parameter& weight = run.named("decoder.layers.0.fc.weight");
        for (const double now : {2.0, 3.0}) {
          store.acquire(weight);
          store.release(weight);
          store.values_will_change();
          for (const FlatShard& shard : store.shards()) shard.values.fill_(now);
          store.values_changed();
          EXPECT_TRUE(at::equal(store.acquire(weight), at::full({10, 60}, now, at::kDouble)));
          store.release(weight);
        }
        store.finish_param_sync();
        EXPECT_EQ(weight.value.numel(), sharding == ShardingStrategy::kOptim ? 600 : 0);
      });
    }
  }
}

// Counts what a rank sends into the collectives of its groups. Signals between threads are
// messages.
struct Sent {
  int64_t all_reduce = 0, reduce_scatter = 0, all_gather = 0;  // elements of the whole tensor
  int calls = 0;
};

class CountingBackend final : public CollectivesOnlyBackend {
 public:
  CountingBackend(std::shared_ptr<Backend> inner, Sent& sent)
      : CollectivesOnlyBackend(std::move(inner)), sent_(sent) {}
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    if (tensor.numel() > 1) sent_.all_reduce += tensor.numel(), ++sent_.calls;
    return inner_->all_reduce(std::move(tensor), op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    sent_.all_gather += output.numel(), ++sent_.calls;
    return inner_->all_gather(std::move(output), std::move(input));
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    return inner_->send(std::move(tensor), peer);
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    return inner_->recv(std::move(tensor), peer);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    sent_.reduce_scatter += input.numel(), ++sent_.calls;
    return inner_->reduce_scatter(std::move(output), std::move(input), op);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<CountingBackend>(inner_->subgroup(ranks, name, use), sent_);
  }

 private:
  Sent& sent_;
};

// Collectives in which ranks only meet have one element.
TEST(DataParallel, PeerCopiesTakeTheCollectivesPlace) {
  for (const ShardingStrategy sharding : kStrategies) {
    for (const int ranks : {2, 3}) {
      if (sharding == ShardingStrategy::kNoShard) continue;
      Layout layout = mesh(1, 1, ranks);
      layout.data = strategy(sharding, true);
      run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
        Sent sent;
        TrainingRank run(layout, std::make_shared<CountingBackend>(world, sent));
        sent = {};
        run.train_step(0);
        run.values();
        EXPECT_EQ(sent.all_gather, 0);
        EXPECT_EQ(sent.reduce_scatter, 0);
        EXPECT_EQ(sent.all_reduce, 0);
      });
    }
  }
}

// Copies are copies, and sums by copies are in the order of the ranks as those of the backend are.
TEST(DataParallel, PeerCopiesGiveTheBitsOfCollectives) {
  for (const ShardingStrategy sharding : kStrategies) {
    if (sharding == ShardingStrategy::kNoShard) continue;
    for (const bool overlap : {false, true}) {
      for (const bool in_bf16 : {false, true}) {
        for (const int instances : {1, 2}) {
          SCOPED_TRACE(cat("strategy ", static_cast<int>(sharding), " overlap ", overlap, " bf16 ",
                           in_bf16, " instances ", instances));
          Layout layout = mesh(1, 1, instances == 1 ? 3 : 4);
          layout.data = strategy(sharding, overlap);
          layout.data.grad_reduce_in_bf16 = in_bf16;
          layout.data.num_distributed_optimizer_instances = instances;
          auto copied = std::make_unique<Stored>(), collected = std::make_unique<Stored>();
          for (const auto& stored : {copied.get(), collected.get()}) {
            layout.data.peer_copies = stored == copied.get();
            run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
              TrainingRank run(layout, world, at::kBFloat16);
              run.train(0, 3);
              stored->write(run.state());
            });
          }
          EXPECT_TRUE(*copied == *collected);
        }
      }
    }
  }
}

// The momentum of a matrix, made nearly orthogonal by five steps X <- 1.5 X - 0.5 X X^T X; AdamW
// with its two moments for all else. No element of the update is known without the whole matrix. On
// the CPU.
const UpdateRule& orthogonal_rule() {
  static const UpdateRule rule = {
      .name = "orthogonal",
      .states = {{"exp_avg"}, {"exp_avg_sq"}},
      .update =
          [](const OptimizerConfig& config, FlatUpdate& flat, const at::Tensor& record) {
            adamw_update(flat, record, {config.adam_beta1, config.adam_beta2, config.adam_eps});
          },
      .update_matrix =
          [](const OptimizerConfig& config, MatrixUpdate& matrix, const at::Tensor& record) {
            const auto& step = *static_cast<const StepState*>(record.const_data_ptr());
            if (step.skip != 0) return;
            const double lr = step.lr[matrix.lr_group] * matrix.lr_factor;
            at::Tensor& momentum = matrix.states[0];
            momentum.mul_(config.sgd_momentum).add_(matrix.grad, step.grad_factor);
            at::Tensor x = momentum / (momentum.norm() + 1e-7);
            for (int i = 0; i < 5; ++i) x = 1.5 * x - 0.5 * at::mm(at::mm(x, x.t()), x);
            matrix.master.mul_(1.0 - lr * step.weight_decay * matrix.weight_decay_mult);
            matrix.master.sub_(x, lr);
          },
      .matrix_states = {{"momentum_buffer"}},
  };
  return rule;
}

// A parameter keeps the states of its kind and no others, in memory, too: what plans count is what
// lies in the shards.
TEST(DataParallel, StatesFollowTheKindOfTheParameter) {
  const UpdateRule& rule = orthogonal_rule();
  for (const int dp : {1, 2, 3}) {
    Layout layout = mesh(1, 1, dp);
    layout.data = strategy(ShardingStrategy::kOptim, false);
    layout.data.whole_matrices = true;
    run_ranks(dp, [&](const std::shared_ptr<Backend>& world) {
      TrainingRank run(layout, world, at::kBFloat16, optimizer_config(), &rule);
      std::map<std::string, std::string> states;  // by the name of the parameter
      std::map<const void*, size_t> memory;       // bytes, by place
      for (const StateTensor& entry : run.optimizer->tensors()) {
        const std::string key = entry.description.key.substr(strlen("optimizer.state."));
        const size_t dot = key.find('.');
        states[key.substr(dot + 1)] += key.substr(0, dot) + " ";
        if (entry.data.numel() > 0)
          memory[entry.data.storage().data()] = entry.data.storage().nbytes();
      }
      int64_t elements = 0, in_matrices = 0, others = 0, in_fp32 = 0;
      for (const FlatShard& shard : run.stores[0]->shards()) {
        if (!shard.trained()) continue;
        if (shard.values.scalar_type() == at::kFloat) {
          in_fp32 += shard.values.numel();
          continue;
        }
        elements += shard.values.numel();
        for (const FlatSlot& slot : shard.slots)
          (is_hidden_matrix(*slot.parameter) ? in_matrices : others) += slot.num_elements();
      }
      for (const Parameter* parameter : run.models[0]->parameters()) {
        const char* expected = !parameter->trainable          ? ""
                               : parameter->keeps_fp32        ? "exp_avg exp_avg_sq "
                               : is_hidden_matrix(*parameter) ? "fp32_param momentum_buffer "
                                                              : "fp32_param exp_avg exp_avg_sq ";
        EXPECT_EQ(states[parameter->name], expected) << parameter->name;
      }
      const auto bytes_of = [&](UpdateKind kind) {
        return optimizer_state_bytes(rule, optimizer_config(), /*half_model=*/true, kind);
      };
      size_t bytes = 0;
      for (const auto& [place, of_one] : memory) bytes += of_one;
      EXPECT_GT(in_matrices, 0);
      EXPECT_EQ(bytes_of(UpdateKind::kMatrix), 4 + 4);
      EXPECT_EQ(bytes_of(UpdateKind::kElementwise), 4 + 8);
      EXPECT_GT(in_fp32, 0);
      // The shard's padding counts as elements of the other parameters, at most.
      const int64_t padding = elements - in_matrices - others;
      const int64_t planned = bytes_of(UpdateKind::kMatrix) * in_matrices +
                              bytes_of(UpdateKind::kElementwise) * (elements - in_matrices) +
                              8 * in_fp32;
      EXPECT_LE(static_cast<int64_t>(bytes), planned);
      EXPECT_GE(static_cast<int64_t>(bytes), planned - 8 * padding);
    });
  }
}

TEST(DataParallel, WholeMatricesAreUpdatedAsOnOneRank) {
  const UpdateRule& rule = orthogonal_rule();
  const Serial expected = train_serial(&rule);
  const at::Tensor plain = serial().values.at("decoder.layers.0.fc.weight");
  EXPECT_GT((expected.values.at("decoder.layers.0.fc.weight") - plain).abs().max().item<double>(),
            1e-3)
      << "another rule";
  for (const int dp : {1, 2, 3}) expect_all_strategies_serial(mesh(1, 1, dp), &rule, expected);
  expect_all_strategies_serial(mesh(2, 1, 1), &rule, expected);
  expect_all_strategies_serial(mesh(2, 1, 3), &rule, expected);
  expect_all_strategies_serial(mesh(2, 2, 2), &rule, expected);
  expect_all_strategies_serial(mesh(1, 1, 2, 2), &rule, expected);
  expect_all_strategies_serial(mesh(1, 2, 2, 1, 2), &rule, expected);
  Layout layout = mesh(2, 1, 4);
  layout.data.num_distributed_optimizer_instances = 2;
  expect_all_strategies_serial(layout, &rule, expected);
}

// Of parameters that shard borders cut, too; of whole matrices by another rule.
TEST(DataParallel, AFactorOfTheLearningRateIsThatRate) {
  for (const ShardingStrategy sharding : kStrategies) {
    for (const std::string rule : {"adam", "sgd", "orthogonal"}) {
      SCOPED_TRACE(cat(rule, " strategy ", static_cast<int>(sharding)));
      Layout layout = mesh(1, 1, 3);
      layout.data = strategy(sharding, false);
      layout.data.whole_matrices = rule == "orthogonal";
      const auto stepped = [&](double lr, double factor) {
        std::vector<std::map<std::string, at::Tensor>> values(3);
        run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
          OptimizerConfig config = optimizer_config();
          config.lr = lr;
          if (rule == "sgd") config.optimizer = rule;
          const UpdateRule& used = rule == "orthogonal" ? orthogonal_rule() : update_rule(config);
          TrainingRank run(layout, world, at::kFloat, config, &used);
          for (Parameter* parameter : run.models[0]->parameters())
            parameter->lr_factor = parameter->name.ends_with("proj.weight") ? factor : 1.0;
          run.optimizer = std::make_unique<Optimizer>(
              used, config, run.optimizer->schedule(),
              std::vector<DistributedDataParallel*>{run.stores[0].get()});
          run.train_step(0);
          values.at(static_cast<size_t>(world->rank())) = run.values();
        });
        return values;
      };
      const auto plain = stepped(1e-2, 1), all = stepped(1e-2 * 0.1, 1),
                 chosen = stepped(1e-2, 0.1);
      for (size_t rank = 0; rank < 3; ++rank) {
        for (const auto& [name, value] : chosen[rank]) {
          const bool scaled = name.ends_with("proj.weight");
          EXPECT_TRUE(at::equal(value, (scaled ? all : plain)[rank].at(name))) << name;
          EXPECT_EQ(at::equal(value, plain[rank].at(name)), !scaled) << name;
        }
      }
    }
  }
}

TEST(DataParallel, ACutMatrixIsFoundBeforeTheFirstStep) {
  Layout layout = mesh(1, 1, 3);
  layout.data = strategy(ShardingStrategy::kOptim, false);
  run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
    EXPECT_THROW(TrainingRank(layout, world, at::kDouble, optimizer_config(), &orthogonal_rule()),
                 InternalError);
  });
}

// Stored in one layout and loaded in two others, where one goes on as if nothing had happened.
TEST(DataParallel, WholeMatricesResumeBitForBit) {
  Layout layout = mesh(2, 1, 2), other = mesh(1, 1, 3);
  layout.data = strategy(ShardingStrategy::kOptim, false);
  other.data = strategy(ShardingStrategy::kOptimGradsParams, true);
  layout.data.whole_matrices = other.data.whole_matrices = true;
  const auto make = [](const Layout& of, const std::shared_ptr<Backend>& world) {
    return std::make_unique<TrainingRank>(of, world, at::kBFloat16, optimizer_config(),
                                          &orthogonal_rule());
  };
  Stored stored, uninterrupted, resumed, moved;
  StepState record;
  run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
    const auto run = make(layout, world);
    run->train(0, 2);
    stored.write(run->state());
    if (world->rank() == 0) record = run->optimizer->read_state();
    run->train_step(2);
    uninterrupted.write(run->state());
  });
  run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
    const auto run = make(layout, world);
    stored.read(run->state());
    run->stores[0]->values_changed();
    run->optimizer->load_state(record);
    run->train_step(2);
    resumed.write(run->state());
  });
  run_ranks(other.ranks(), [&](const std::shared_ptr<Backend>& world) {
    const auto run = make(other, world);
    stored.read(run->state());
    moved.write(run->state());
  });
  stored.expect_each_element_once();
  moved.expect_each_element_once();
  EXPECT_TRUE(stored == moved);
  EXPECT_TRUE(uninterrupted == resumed);
  EXPECT_FALSE(stored == resumed);
}

// Whoever writes what peers may be reading is told.
TEST(DataParallel, ValuesChangeWhenNobodyReadsThem) {
  for (const ShardingStrategy sharding :
       {ShardingStrategy::kOptim, ShardingStrategy::kOptimGradsParams}) {
    Layout layout = mesh(1, 1, 2);
    layout.data = strategy(sharding, true);
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      TrainingRank run(layout, world);
      DistributedDataParallel& store = *run.stores[0];
      Parameter& weight = run.named("decoder.layers.0.fc.weight");
      store.values_will_change();
      store.values_changed();
      store.acquire(weight);
      store.release(weight);
      EXPECT_THROW(store.values_changed(), InternalError);
      store.values_will_change();
      store.values_changed();
      store.finish_param_sync();
    });
  }
}

// What DistributedDataParallel says it communicates in a step, where memory cannot be shared.
TEST(DataParallel, Traffic) {
  const int64_t passes = kGlobalBatch / 2;
  for (const ShardingStrategy sharding : kStrategies) {
    for (const int instances : {1, 2}) {
      const bool whole = sharding == ShardingStrategy::kNoShard;
      if (whole && instances > 1) continue;
      Layout layout = mesh(1, 1, 2 * instances);
      layout.data = strategy(sharding, true);
      layout.data.num_distributed_optimizer_instances = instances;
      layout.data.peer_copies = false;
      SCOPED_TRACE(cat("strategy ", static_cast<int>(sharding), " instances ", instances));
      run_ranks(layout.ranks(), [&](const std::shared_ptr<Backend>& world) {
        Sent sent;
        TrainingRank run(layout, std::make_shared<CountingBackend>(world, sent));
        run.train_step(0);
        sent = {};
        run.train_step(1);
        const BufferLayout& layout_of_rank = run.stores[0]->layout();
        const int64_t all = layout_of_rank.num_trained_elements;
        const int64_t rounds = sharding >= ShardingStrategy::kOptimGrads ? passes / instances : 1;
        int64_t tables = 0;  // of embeddings, which are summed after the last pass
        for (const BufferBucket& bucket : layout_of_rank.buckets) {
          const bool table =
              std::all_of(bucket.parameters.begin(), bucket.parameters.end(), [&](int index) {
                return run.stores[0]->parameters()[static_cast<size_t>(index)]->role ==
                       ParameterRole::kEmbedding;
              });
          if (table && !bucket.frozen) tables += bucket.end - bucket.begin;
        }
        EXPECT_GT(tables, 0);
        EXPECT_EQ(sent.reduce_scatter, whole ? 0 : rounds * (all - tables) + tables);
        EXPECT_EQ(sent.all_reduce, whole ? all : instances == 1 ? 0 : all / 2);
        if (sharding != ShardingStrategy::kOptimGradsParams) {
          EXPECT_EQ(sent.all_gather, whole ? 0 : all);
        } else {
          // Forward and backward; what ends one is still there when the other begins.
          const int64_t with_frozen = run.stores[0]->layout().num_elements;
          EXPECT_LE(sent.all_gather, 2 * rounds * with_frozen);
          EXPECT_GT(sent.all_gather, rounds * with_frozen);
        }
      });
    }
  }
}

TEST(DataParallel, TheSameLayoutGivesTheSameBits) {
  for (const ShardingStrategy sharding : kStrategies) {
    Layout layout = mesh(1, 1, 3);
    layout.data = strategy(sharding, true);
    auto first = std::make_unique<Stored>(), second = std::make_unique<Stored>();
    for (const auto& stored : {first.get(), second.get()}) {
      run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
        TrainingRank run(layout, world, at::kFloat);
        run.train(0, 3);
        stored->write(run.state());
      });
    }
    EXPECT_TRUE(*first == *second);
  }
}

// A layer at a time; with the next one on its way, two.
TEST(DataParallel, GatheredLayersAreBounded) {
  for (const bool overlap : {false, true}) {
    Layout layout = mesh(1, 1, 2);
    layout.data = strategy(ShardingStrategy::kOptimGradsParams, overlap);
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      TrainingRank run(layout, world);
      EXPECT_EQ(run.stores[0]->layout().buckets.size(), static_cast<size_t>(2 * kLayers) + 4)
          << "layers, the last one with the final norm, what keeps fp32 in each, the frozen parts "
             "of two, the tied table, positions";
      EXPECT_EQ(run.named("decoder.layers.0.fc.weight").value.numel(), 0);
      run.stores[0]->take_peak_gathered();
      run.train(0, 2);
      EXPECT_EQ(run.stores[0]->take_peak_gathered(), overlap ? 2 : 1);
      EXPECT_EQ(run.stores[0]->take_peak_gathered(), 0) << "nothing stays gathered after a step";
      EXPECT_EQ(run.stores[0]->flat_values().numel() * 2, run.stores[0]->layout().num_elements);
      EXPECT_EQ(run.stores[0]->flat_grads().numel() * 2,
                run.stores[0]->layout().num_trained_elements);
    });
  }
}

}  // namespace
}  // namespace megatron
