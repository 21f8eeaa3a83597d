// Copies to and from the memory of other ranks, which are threads.
#include "megatron/comm/peer_memory.h"

#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/allocation_meter.h"

namespace megatron {
namespace {

TEST(PeerMemory, ReadsAndWritesTheBuffersOfOtherRanks) {
  run_ranks(3, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "world");
    const int rank = group.rank(), next = (rank + 1) % 3;
    const at::Tensor buffer = at::full({4 + rank, 2}, rank, at::kBFloat16);  // sizes differ
    const SharedMemory shared = share_memory(buffer, group);
    ASSERT_NE(shared.peers, nullptr) << shared.obstacle;
    EXPECT_EQ(shared.obstacle, "");

    const at::Tensor got = at::full({2, 3}, -1, at::kBFloat16),
                     own = at::full({2}, -1, at::kBFloat16);
    const auto work =
        shared.peers->run([&] { shared.peers->read({{next, 2, got}, {rank, 0, own}}); });
    EXPECT_EQ(got.max().item<float>(), -1) << "there after wait() and not before";
    work->wait();
    work->wait();
    EXPECT_TRUE(at::equal(got, at::full({2, 3}, next, at::kBFloat16)));
    EXPECT_TRUE(at::equal(own, at::full({2}, rank, at::kBFloat16)));
    group.barrier();

    const at::Tensor sent = at::full({2}, 10 + rank, at::kBFloat16);
    shared.peers->run([&] { shared.peers->write({{next, 6, sent}}); })->wait();
    group.barrier();
    EXPECT_EQ(buffer.view({-1})[5].item<float>(), rank);
    EXPECT_EQ(buffer.view({-1})[6].item<float>(), 10 + (rank + 2) % 3);
    EXPECT_EQ(buffer.view({-1})[7].item<float>(), 10 + (rank + 2) % 3);
    group.barrier();
  });
}

// The memory of a rank that has left stays until its peers have, too.
TEST(PeerMemory, OutlivesTheRank) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "world");
    SharedMemory shared = share_memory(at::full({1 << 20}, group.rank(), at::kFloat), group);
    if (group.rank() == 0) {
      shared = {};
      group.barrier();
      return;
    }
    group.barrier();
    const at::Tensor got = at::empty({1 << 20}, at::kFloat);
    shared.peers->run([&] { shared.peers->read({{0, 0, got}}); })->wait();
    EXPECT_EQ(at::count_nonzero(got).item<int64_t>(), 0);
  });
}

TEST(PeerMemory, NoticesThatAnOwnerWritesWhatIsRead) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "world");
    const at::Tensor buffer = at::zeros({8}, at::kFloat), got = at::empty({8}, at::kFloat);
    const SharedMemory shared = share_memory(buffer, group);
    const auto work = shared.peers->run([&] { shared.peers->read({{1 - group.rank(), 0, got}}); });
    group.barrier();
    if (group.rank() == 0) buffer[3] = 1;
    group.barrier();
    if (group.rank() == 0) {
      work->wait();
    } else {
      EXPECT_THROW(work->wait(), InternalError);
    }
    group.barrier();
  });
}

// As over CUDA: a read needs no memory, and what is written stays until the work is waited for.
TEST(PeerMemory, CopiesNeedNoTensorsButTheLocalOnes) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "world");
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    const SharedMemory shared = share_memory(at::zeros({256}, at::kFloat), group);
    const at::Tensor got = at::empty({256}, at::kFloat);
    at::Tensor sent = at::ones({256}, at::kFloat);
    group.barrier();
    const int64_t before = meter->live;
    const int peer = 1 - group.rank();
    const auto read = shared.peers->run([&] { shared.peers->read({{peer, 0, got}}); });
    EXPECT_EQ(meter->live, before);
    read->wait();
    group.barrier();
    const auto written = shared.peers->run([&] { shared.peers->write({{peer, 0, sent}}); });
    sent.reset();
    EXPECT_EQ(meter->live, before);
    written->wait();
    EXPECT_EQ(meter->live, before - 256 * 4);
    group.barrier();
  });
}

TEST(PeerMemory, RefusesCopiesThatDoNotFit) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "world");
    const at::Tensor buffer = at::zeros({8}, at::kFloat);
    const SharedMemory shared = share_memory(buffer, group);
    const auto read = [&](int rank, int64_t begin, const at::Tensor& local) {
      shared.peers->run([&] { shared.peers->read({{rank, begin, local}}); });
    };
    EXPECT_THROW(read(0, 5, at::zeros({4}, at::kFloat)), InternalError);
    EXPECT_THROW(read(2, 0, at::zeros({4}, at::kFloat)), InternalError);
    EXPECT_THROW(read(0, 0, at::zeros({4}, at::kDouble)), InternalError);
    EXPECT_THROW(shared.peers->read({{0, 0, at::zeros({4}, at::kFloat)}}), InternalError);
    group.barrier();
  });
}

}  // namespace
}  // namespace megatron
