// ProcessGroup of one rank, and collectives on tensors with threads as ranks.
#include "megatron/comm/process_group.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

TEST(ProcessGroup, OneRankDoesNothing) {
  const ProcessGroup self;
  EXPECT_EQ(self.rank(), 0);
  EXPECT_EQ(self.size(), 1);
  EXPECT_EQ(self.name(), "self");
  const at::Tensor x = at::arange(6, at::kFloat).view({2, 3});
  const at::Tensor before = x.clone();
  self.all_reduce(x)->wait();
  self.broadcast(x, 0)->wait();
  self.barrier();
  EXPECT_TRUE(at::equal(x, before));
  const at::Tensor out = at::zeros_like(x);
  self.all_gather(out, x)->wait();
  EXPECT_TRUE(at::equal(out, x));
  self.reduce_scatter(out.zero_(), x)->wait();
  EXPECT_TRUE(at::equal(out, x));
  self.all_to_all(out.zero_(), {2}, x, {2})->wait();
  EXPECT_TRUE(at::equal(out, x));
  EXPECT_EQ(error_of([&] { self.send(x, 0); }),
            "send from rank 0 to rank 0 of group self, which has 1 ranks");
  EXPECT_EQ(error_of([&] { self.recv(x, 1); }),
            "recv on rank 0 from rank 1 of group self, which has 1 ranks");
  EXPECT_EQ(error_of([&] { self.broadcast(x, 1); }),
            "broadcast from rank 1 of group self, which has 1 ranks");
  EXPECT_EQ(error_of([&] { self.all_gather(at::zeros({5}), x); }),
            "all_gather over 1 rank takes equal sizes, got 6 elements into 5");
}

TEST(ThreadBackend, Collectives) {
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup world(backend, "world");
    const int rank = world.rank();
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong}) {
      const at::Tensor x = at::full({2, 3}, rank, dtype);
      world.all_reduce(x)->wait();
      EXPECT_TRUE(at::equal(x, at::full({2, 3}, 6, dtype)));
      x.fill_(rank);
      world.all_reduce(x, ReduceOp::kMax)->wait();
      EXPECT_TRUE(at::equal(x, at::full({2, 3}, 3, dtype)));

      const at::Tensor gathered = at::zeros({8}, dtype);
      world.all_gather(gathered, at::full({2}, rank, dtype))->wait();
      EXPECT_TRUE(at::equal(gathered, at::arange(4).repeat_interleave(2).to(dtype)));

      const at::Tensor part = at::zeros({2}, dtype);
      world.reduce_scatter(part, at::arange(8, dtype))->wait();
      EXPECT_TRUE(at::equal(part, at::arange(2 * rank, 2 * rank + 2, dtype) * 4));
    }
    const at::Tensor flag = at::full({1}, rank == 3, at::kBool);
    world.broadcast(flag, 3)->wait();
    EXPECT_TRUE(flag.item<bool>());
  });
}

TEST(ThreadBackend, ResultsAreSeenWhenTheyAreWaitedFor) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const at::Tensor sum = at::full({2}, 1 + backend->rank(), at::kFloat), before = sum.clone();
    const at::Tensor gathered = at::zeros({4});
    const auto reduction = backend->all_reduce(sum, ReduceOp::kSum);
    const auto gather = backend->all_gather(gathered, before);
    EXPECT_TRUE(at::equal(sum, before));
    EXPECT_TRUE(at::equal(gathered, at::zeros({4})));
    reduction->wait();
    reduction->wait();
    EXPECT_TRUE(at::equal(sum, at::full({2}, 3, at::kFloat)));
    gather->wait();
    EXPECT_TRUE(at::equal(gathered, at::tensor({1.0F, 1.0F, 2.0F, 2.0F})));
  });
}

TEST(ThreadBackend, AllToAllCountsRows) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    // Rank 0 keeps 1 row and sends 2; rank 1 sends 3 rows and keeps none.
    const bool zero = backend->rank() == 0;
    const at::Tensor in = at::arange(6, at::kFloat).view({3, 2}) + 10 * backend->rank();
    const at::Tensor out = at::zeros({zero ? 4 : 2, 2});
    const std::vector<int64_t> sends =
        zero ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{3, 0};
    const std::vector<int64_t> takes =
        zero ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 0};
    backend->all_to_all(out, takes, in, sends)->wait();
    const at::Tensor base = at::arange(6, at::kFloat).view({3, 2});
    EXPECT_TRUE(
        at::equal(out, zero ? at::cat({base.narrow(0, 0, 1), base + 10}) : base.narrow(0, 1, 2)));
    EXPECT_EQ(error_of([&] { backend->all_to_all(out, takes, in, {1, 1}); }),
              "all_to_all input has 3 rows, its sizes sum to 2");
  });
}

TEST(ThreadBackend, PointToPointInASubgroup) {
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    const int first = backend->rank() / 2 * 2;
    const ProcessGroup pair = ProcessGroup(backend, "world").subgroup({first, first + 1}, "tp");
    EXPECT_EQ(pair.size(), 2);
    EXPECT_EQ(pair.rank(), backend->rank() % 2);
    const at::Tensor x = at::full({3}, backend->rank(), at::kFloat);
    if (pair.rank() == 0) pair.send(x, 1)->wait();
    if (pair.rank() == 1) {
      const at::Tensor got = at::empty({3});
      pair.recv(got, 0)->wait();
      EXPECT_TRUE(at::equal(got, x - 1));
    }
    pair.barrier();
    EXPECT_EQ(ProcessGroup(backend, "world").subgroup({backend->rank()}, "self").size(), 1);
  });
}

TEST(ThreadBackend, AReceivePostedEarlyBlocksNothingAndKeepsTheOrder) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const int peer = 1 - backend->rank();
    at::Tensor a = at::empty({2}), b = at::empty({3});
    const auto first = backend->recv(a, peer), second = backend->recv(b, peer);
    backend->send(at::full({2}, 1.0), peer)->wait();
    backend->send(at::full({3}, 2.0), peer)->wait();
    second->wait();
    first->wait();
    EXPECT_TRUE(at::equal(a, at::full({2}, 1.0)));
    EXPECT_TRUE(at::equal(b, at::full({3}, 2.0)));
  });
}

TEST(ThreadBackend, RefusesWhatItCannotCopy) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    EXPECT_EQ(error_of([&] { backend->all_reduce(at::zeros({2, 3}).t(), ReduceOp::kSum); }),
              "all_reduce takes contiguous tensors");
    EXPECT_EQ(error_of([&] { backend->all_gather(at::zeros({3}), at::zeros({2})); }),
              "all_gather of 2 elements over 2 ranks into 3 elements");
    EXPECT_EQ(error_of([&] { backend->all_gather(at::zeros({4}), at::zeros({2}, at::kDouble)); }),
              "all_gather from F64 to F32");
    EXPECT_EQ(
        error_of([&] { backend->reduce_scatter(at::zeros({2}), at::zeros({3}), ReduceOp::kSum); }),
        "reduce_scatter of 3 elements over 2 ranks into 2 elements");
  });
}

TEST(ThreadBackend, TheFirstErrorIsRethrown) {
  const int threads = at::get_num_threads();
  EXPECT_EQ(error_of([] {
              run_ranks(3, [](const std::shared_ptr<Backend>& backend) {
                MEGATRON_CHECK(backend->rank() != 1, "rank 1 fails");
                backend->barrier();
              });
            }),
            "rank 1 fails");
  EXPECT_EQ(at::get_num_threads(), threads);
}

TEST(ThreadBackend, AReceiveIsFinishedOnceItsMessageIsThere) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    if (backend->rank() == 1) {
      backend->barrier();
      backend->send(at::tensor({1.0f}), 0)->wait();
      backend->barrier();
      backend->barrier();
      backend->send(at::tensor({2.0f}), 0)->wait();
      backend->barrier();
      return;
    }
    at::Tensor a = at::zeros({1}), b = at::zeros({1});
    const auto first = backend->recv(a, 1), second = backend->recv(b, 1);
    const auto finished = [](const std::shared_ptr<Work>& work) {
      return work->progress()->finished();
    };
    EXPECT_FALSE(finished(first));
    backend->barrier();
    backend->barrier();
    EXPECT_TRUE(finished(first));
    EXPECT_FALSE(finished(second));
    first->wait();
    EXPECT_TRUE(finished(first));
    EXPECT_FALSE(finished(second));
    backend->barrier();
    backend->barrier();
    EXPECT_TRUE(finished(second));
    second->wait();
    EXPECT_EQ(a.item<float>() + b.item<float>(), 3.0f);
  });
}

}  // namespace
}  // namespace megatron
