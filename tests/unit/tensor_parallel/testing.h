// Tensor-parallel ranks as threads.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {

// Runs body(groups) on `ranks` threads that form one tensor-parallel group.
inline void run_tensor_ranks(int ranks, const std::function<void(const ParallelGroups&)>& body) {
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& backend) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(backend, "tp");
    const std::shared_ptr<PeerMailbox> mailbox = groups.tp.mailbox();  // held during the body
    body(groups);
  });
}

// Opens the mailbox of the tensor ranks, if there are several.
inline void open_mailbox(const ParallelGroups& groups, int64_t part_bytes) {
  if (const auto mailbox = groups.tp.mailbox()) mailbox->open(at::kCPU, part_bytes);
}
inline int64_t num_exchanges(const ParallelGroups& groups) {
  const auto mailbox = groups.tp.mailbox();
  return mailbox ? mailbox->exchanges() : 0;
}

// Random numbers, the same on every rank.
inline at::Tensor draw(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kDouble) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::dtype(type));
}

inline at::Tensor leaf(const at::Tensor& x) { return x.detach().clone().set_requires_grad(true); }

// This rank's part of `x` along `dim`.
inline at::Tensor part(const at::Tensor& x, int64_t dim, const ProcessGroup& tp) {
  return x.chunk(tp.size(), dim)[static_cast<size_t>(tp.rank())].contiguous();
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected,
                        const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(actual.detach(), expected.detach(), 1e-11, 1e-12))
      << what << ": off by " << (actual - expected).abs().max().item<double>();
}

}  // namespace megatron
