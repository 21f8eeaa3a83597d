// Exchanges through a mailbox with checks of their results, for threads on CPUs and on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "megatron/comm/peer_mailbox.h"
#include "megatron/tensor/torch.h"

namespace megatron {

// Gathers and scatters in flight at the same time, with parts of two sizes, more of them than there
// are slots; sources and results are reused immediately. Every element encodes sender, receiver and
// round.
inline void exchange_in_rounds(PeerMailbox& mailbox, const ProcessGroup& group, at::Device device,
                               int64_t rows, int rounds) {
  const int size = group.size(), own = group.rank();
  const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device);
  at::Tensor gathered = at::empty({rows, 64}, options),
             scattered = at::empty({size, rows, 64}, options);
  at::Tensor wrong = at::zeros({}, options.dtype(at::kLong));
  for (int round = 0; round < rounds; ++round) {
    const int64_t n = round % 3 == 2 ? rows / 2 : rows;
    gathered.fill_(8 * own + round % 8);
    PeerExchange gather(mailbox, gathered.narrow(0, 0, n));
    for (int step = 1; step <= size; ++step)
      gather.post((own + step) % size, gathered.narrow(0, 0, n));
    PeerExchange scatter(mailbox, scattered[0].narrow(0, 0, n));
    for (int step = 1; step < size; ++step) {
      const int to = (own + step) % size;
      scattered[to].fill_(64 + 16 * own + 4 * to + round % 4);
      scatter.post(to, scattered[to].narrow(0, 0, n));
    }
    if (round % 2 == 0)
      wrong += gather.part((own + 1) % size).ne(8 * ((own + 1) % size) + round % 8).sum();
    const at::Tensor all = gather.parts(0, size);
    ASSERT_EQ(all.sizes(), at::IntArrayRef({size * n, 64}));
    for (int from = 0; from < size; ++from) {
      wrong += all.narrow(0, from * n, n).ne(8 * from + round % 8).sum();
      if (from != own) wrong += scatter.part(from).ne(64 + 16 * from + 4 * own + round % 4).sum();
    }
    scatter.close();  // before the one opened first
  }
  EXPECT_EQ(wrong.item<int64_t>(), 0);
}

}  // namespace megatron
