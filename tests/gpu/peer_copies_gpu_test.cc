// Peer-to-peer copies between ranks on GPUs, concurrently with computation on other streams. Ranks
// are threads, each with its own stream, on one GPU or on two. CUDA IPC needs processes and is
// covered by `megatron prove` under a launcher with several GPUs.
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <optional>

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/peer_memory.h"
#include "megatron/kernels/copy_pieces.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/sum_parts.h"
#include "megatron/tensor/torch.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/unit/comm/mailbox_rounds.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

// Pieces of whole 16-byte words, of 4-byte words, and both at places that are not aligned to 16.
TEST(CopyPieces, CopyWhatIsInThemAndNothingElse) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  at::manual_seed(1);
  const at::Tensor from = at::randint(0, 256, {4 << 20}, at::kByte);
  const at::Tensor expected = at::zeros_like(from), there = from.to(gpu),
                   to = at::zeros_like(there);
  std::vector<PieceCopy> pieces;
  int64_t place = 0;
  for (int i = 0; i < 300; ++i) {  // of three launches
    const int64_t bytes = i == 7 ? 0 : i % 3 == 0 ? 16 * (i + 1) : i == 50 ? 999'996 : 4 * (37 + i);
    const int64_t target = place + (i % 5 == 0 ? 16 : 4);
    pieces.push_back({there.data_ptr<uint8_t>() + place, to.data_ptr<uint8_t>() + target, bytes});
    expected.narrow(0, target, bytes).copy_(from.narrow(0, place, bytes));
    place += (bytes + 16 + 15) / 16 * 16 + (i % 4 == 0 ? 4 : 0);
  }
  ASSERT_LT(place, from.numel());
  copy_pieces_cuda(pieces, c10::cuda::getCurrentCUDAStream(0).stream());
  EXPECT_TRUE(at::equal(to.cpu(), expected));
  EXPECT_FALSE(fits_copy_pieces({there.data_ptr<uint8_t>(), to.data_ptr<uint8_t>(), 6}));
}

// What this rank holds of the weights after three steps of two passes; gradients depend on the
// values and on the rank.
std::vector<at::Tensor> train(const std::shared_ptr<Backend>& world, at::Device device,
                              const DistributedDataParallelConfig& data) {
  const ParallelGroups groups = make_parallel_groups({}, world);
  TestModel model;
  for (int layer = 0; layer < 4; ++layer) {
    model.declare(cat("decoder.layers.", layer, ".weight"), {1500, 1001});
    model.declare(cat("decoder.layers.", layer, ".bias"), {333}, ParameterRole::kBias);
  }
  DistributedDataParallel store(model, groups, at::kBFloat16, device, data);
  for (size_t k = 0; k < model.size(); ++k) model[k].init = Init::normal(0.5);
  store.initialize(3);
  OptimizerConfig config;
  config.lr = 1e-2;
  config.clip_grad = 0;
  Optimizer optimizer(config, make_schedule(config, {100, std::nullopt, 4}), store);
  for (int step = 0; step < 3; ++step) {
    store.zero_grad(2);
    for (int pass = 0; pass < 2; ++pass) {
      for (size_t k = 0; k < model.size(); ++k) {  // a forward
        store.acquire(model[k]);
        store.release(model[k]);
      }
      for (size_t k = model.size(); k-- > 0;) {
        const at::Tensor value = store.acquire(model[k]);
        const at::Tensor gradient =
            at::cos(value.to(at::kFloat) * 3.0 + (step + 2 * pass + 7 * world->rank()));
        store.release(model[k]);
        store.grad_target(model[k]).to_add_to().add_(gradient);
        store.grad_ready(model[k]);
      }
    }
    store.finish_grad_sync();
    optimizer.step(4.0, 4);
  }
  store.finish_param_sync();
  std::vector<at::Tensor> all;
  for (const StateTensor& entry : store.state()) all.push_back(entry.data.cpu());
  return all;
}

TEST(PeerCopiesGpu, ReadsAndWrites) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  run_gpu_ranks(2, [](const std::shared_ptr<Backend>& world, at::Device device) {
    const ProcessGroup group(world, "world");
    const int rank = group.rank();
    constexpr int64_t kCount = int64_t{64} << 20;
    const at::Tensor buffer =
        at::full({kCount}, rank, at::TensorOptions().dtype(at::kFloat).device(device));
    const SharedMemory shared = share_memory(buffer, group);
    ASSERT_NE(shared.peers, nullptr) << shared.obstacle;
    const at::Tensor got = at::empty_like(buffer);
    shared.peers->run([&] { shared.peers->read({{1 - rank, 0, got}}); })->wait();
    EXPECT_EQ((got == static_cast<float>(1 - rank)).sum().item<int64_t>(), kCount);
    world->barrier();
    got.fill_(10 + rank);
    shared.peers->run([&] { shared.peers->write({{1 - rank, 0, got}}); })->wait();
    c10::cuda::device_synchronize();
    world->barrier();
    EXPECT_EQ((buffer == static_cast<float>(11 - rank)).sum().item<int64_t>(), kCount);
  });
}

TEST(PeerCopiesGpu, MailboxBringsEveryPart) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const int size : {2, 4})
    run_gpu_ranks(size, [](const std::shared_ptr<Backend>& world, at::Device device) {
      const ProcessGroup group(world, "tp");
      PeerMailbox mailbox(group);
      constexpr int64_t kRows = 32768;
      mailbox.open(device, kRows * 64 * 2);
      ASSERT_EQ(mailbox.obstacle(), "");
      exchange_in_rounds(mailbox, group, device, kRows, 40);
    });
}

// Streams that wait for one another's signals need queues of their own, which ranks that share a
// GPU do not always get: with one GPU gradients are summed by collectives.
TEST(PeerCopiesGpu, GiveTheBitsOfCollectives) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const ShardingStrategy strategy : {ShardingStrategy::kOptim, ShardingStrategy::kOptimGrads,
                                          ShardingStrategy::kOptimGradsParams}) {
    for (const bool in_bf16 : {false, true}) {
      DistributedDataParallelConfig data;
      data.use_megatron_fsdp = data.overlap_param_gather = true;
      data.overlap_grad_reduce = c10::cuda::device_count() > 1;
      data.data_parallel_sharding_strategy = strategy;
      data.grad_reduce_in_bf16 = in_bf16;
      if (strategy != ShardingStrategy::kOptimGradsParams) data.ddp_bucket_size = 2'000'000;
      run_gpu_ranks(2, [&](const std::shared_ptr<Backend>& world, at::Device device) {
        DistributedDataParallelConfig collectives = data;
        collectives.peer_copies = false;
        const std::vector<at::Tensor> copied = train(world, device, data),
                                      collected = train(world, device, collectives);
        ASSERT_EQ(copied.size(), collected.size());
        for (size_t i = 0; i < copied.size(); ++i)
          EXPECT_TRUE(at::equal(copied[i], collected[i]))
              << "strategy " << static_cast<int>(strategy) << " tensor " << i;
      });
    }
  }
}

// Values of a rank that sums round, with signs and sizes that depend on the place.
at::Tensor values_of_rank(int rank, int64_t count, at::ScalarType type, int call) {
  const at::Tensor x = at::arange(count, at::kDouble);
  return (at::sin(x * (0.7 + 0.1 * rank) + call) * (1 + 100.0 * rank) + 0.01 * rank).to(type);
}

// What all ranks get, by the rule of the header.
at::Tensor reduced_by_hand(int ranks, int64_t count, at::ScalarType type, int call, ReduceOp op) {
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  at::Tensor total;
  for (int rank = 0; rank < ranks; ++rank) {
    const at::Tensor own = values_of_rank(rank, count, type, call).to(half ? at::kFloat : type);
    total = rank == 0 ? own : op == ReduceOp::kMax ? at::maximum(total, own) : total + own;
  }
  return total.to(type);
}

struct OneShotRun {
  int ranks;
  at::Device device;
  PeerCollectives& peers;
  const ProcessGroup& group;
};

void expect_reductions(const OneShotRun& run, at::ScalarType type, int64_t count, int call) {
  const auto own = [&] {
    return values_of_rank(run.group.rank(), count, type, call).to(run.device);
  };
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    const at::Tensor expected = reduced_by_hand(run.ranks, count, type, call, op), got = own();
    run.group.all_reduce(got, op)->wait();
    EXPECT_TRUE(at::equal(got.cpu(), expected)) << count << " of " << toString(type);
    if (op == ReduceOp::kMax || !at::isFloatingType(type)) continue;
    const at::Tensor addend = values_of_rank(5, count, type, call).to(run.device), both = own();
    run.peers.all_reduce(both, op, addend);
    EXPECT_TRUE(at::equal(both, expected.to(run.device) + addend)) << count << toString(type);
    constexpr int64_t kRow = 512;
    if (count % kRow != 0) continue;
    // Each rank's rows times powers of two of its own.
    const at::Tensor factors =
        at::exp2((at::arange(count / kRow) * (run.group.rank() + 1)).remainder(7) - 3.0)
            .to(run.device, at::kFloat);
    const at::Tensor with = own(), before = own();
    before.view({-1, kRow}).mul_(factors.unsqueeze(1).to(type));
    run.peers.all_reduce(before, op, addend);
    run.peers.all_reduce(with, op, addend, factors);
    EXPECT_TRUE(at::equal(with, before)) << count << toString(type);
  }
  const at::Tensor all = at::empty({run.ranks, count}, at::dtype(type).device(run.device));
  run.group.all_gather(all, own())->wait();
  for (int rank = 0; rank < run.ranks; ++rank)
    EXPECT_TRUE(at::equal(all[rank].cpu(), values_of_rank(rank, count, type, call)))
        << count << " of " << toString(type);
}

// Sums plus an addend, and sums of these, 200 times by one graph.
void expect_replays(const OneShotRun& run) {
  const at::Tensor x = at::zeros({4096}, at::dtype(at::kBFloat16).device(run.device)),
                   addend = at::full_like(x, 0.25), y = at::empty_like(x);
  DeviceGraphPool pool(run.device);
  std::optional<DeviceGraph> graph;
  for (int turn = 0; turn < run.ranks; ++turn) {
    if (turn == run.group.rank())
      graph.emplace(pool, [&] {
        y.copy_(x);
        run.peers.all_reduce(y, ReduceOp::kSum, addend);
        run.group.all_reduce(y)->wait();
      });
    run.group.barrier();
  }
  for (int i = 0; i < 200; ++i) {
    x.fill_(i + 3 * run.group.rank());
    graph->launch();
    const int sum = run.ranks * i + 3 * run.ranks * (run.ranks - 1) / 2;
    const at::Tensor once = at::full({}, sum, at::kBFloat16) + at::full({}, 0.25, at::kBFloat16),
                     twice = (once.to(at::kFloat) * run.ranks).to(at::kBFloat16);
    EXPECT_EQ((y != twice.item<float>()).sum().item<int64_t>(), 0) << "replay " << i;
  }
}

// Ranks that share a GPU need room for all their blocks at a time, so that large tensors are
// reduced where each has its own.
TEST(PeerCollectivesGpu, ReduceInTheOrderOfRanksAndGather) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const int ranks : {2, 3, 4}) {
    const bool apart = c10::cuda::device_count() >= ranks;
    if (2 * c10::cuda::device_count() < ranks) continue;
    run_gpu_ranks(ranks, [&](const std::shared_ptr<Backend>& world, at::Device device) {
      const ProcessGroup group(world, "tp");
      const auto peers = group.peer_collectives();
      peers->open(device, 4096);
      ASSERT_EQ(peers->obstacle(), "");
      peers->open(device, apart ? 40 << 20 : 256 << 10);
      const OneShotRun run{ranks, device, *peers, group};
      int call = 0;
      std::vector<int64_t> counts = {1, 2, 7, 130, 1000, 4096, 5003};
      if (apart) counts.insert(counts.end(), {40'000, 500'001, 3'000'000});
      for (const at::ScalarType type :
           {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble, at::kInt, at::kLong})
        for (const int64_t count : counts) {
          if (count > 1'000'000 && type != at::kBFloat16) continue;
          expect_reductions(run, type, count, ++call);
        }
      const at::Tensor large = at::zeros({64 << 20}, at::dtype(at::kByte).device(device));
      EXPECT_FALSE(peers->takes_reduction(large.view(at::kFloat)) || peers->takes_gather(large));
      peers->take_all_reductions();
      EXPECT_TRUE(peers->takes_reduction(large.view(at::kFloat)));
      expect_replays(run);
    });
  }
}

TEST(SumPartsGpu, EqualsTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const int64_t count : {4096, 1001}) {
    for (const auto& [type, target_type] : {std::pair{at::kFloat, at::kFloat},
                                            {at::kBFloat16, at::kBFloat16},
                                            {at::kBFloat16, at::kFloat},
                                            {at::kDouble, at::kDouble}}) {
      for (const bool accumulate : {false, true}) {
        std::vector<at::Tensor> parts, there;
        for (int part = 0; part < 3; ++part) {
          parts.push_back(at::sin(at::arange(count, at::kDouble) * (0.3 + part)).to(type));
          there.push_back(parts.back().cuda());
        }
        const at::Tensor target = at::cos(at::arange(count, at::kDouble)).to(target_type),
                         on_gpu = target.cuda();
        sum_parts(parts, target, accumulate);
        sum_parts(there, on_gpu, accumulate);
        EXPECT_TRUE(at::equal(target, on_gpu.cpu())) << count << " " << type << " " << target_type;
      }
    }
  }
}

}  // namespace
}  // namespace megatron
