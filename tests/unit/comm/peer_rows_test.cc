// Rows that ranks as threads write straight to their places in each other's memory.
#include "megatron/comm/peer_rows.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using Source = PeerRowExchange::Source;

// In exchange n rank r has (r + n) mod 3 rows for rank `to`, which lie there by sender, those of
// each sender in two pieces that change places.
int64_t rows_of(int from, int to, int n) { return 2 * ((from + 2 * to + n) % 3); }
float value_of(int from, int to, int n) { return static_cast<float>(100 * n + 10 * from + to); }

std::vector<Source> sources_of(int own, int size, int n, int64_t columns) {
  const int64_t row_bytes = columns * static_cast<int64_t>(sizeof(float));
  std::vector<Source> sources;
  for (int to = 0; to < size; ++to) {
    int64_t first = 0;
    for (int from = 0; from < own; ++from) first += rows_of(from, to, n);
    const int64_t half = rows_of(own, to, n) / 2;
    const at::Tensor rows = at::full({2 * half, columns}, value_of(own, to, n));
    rows.narrow(0, half, half).add_(0.5);
    const int64_t bytes = half * row_bytes;
    sources.push_back(
        {rows, {{to, first * row_bytes + bytes, 0, bytes}, {to, first * row_bytes, bytes, bytes}}});
  }
  return sources;
}

at::Tensor expected_rows(int own, int size, int n, int64_t columns) {
  std::vector<at::Tensor> rows;
  for (int from = 0; from < size; ++from) {
    const int64_t half = rows_of(from, own, n) / 2;
    rows.push_back(at::full({half, columns}, value_of(from, own, n) + 0.5F));
    rows.push_back(at::full({half, columns}, value_of(from, own, n)));
  }
  return at::cat(rows);
}

TEST(PeerRows, ArriveAtTheirPlaces) {
  for (const int size : {2, 3}) {
    run_ranks(size, [size](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup group(backend, "ep");
      PeerRows rows(group);
      int n = 0;
      const auto exchange = [&](int64_t columns, int count) {
        std::vector<std::pair<int, std::unique_ptr<PeerRowExchange>>> open;
        const auto end = [&] {
          const at::Tensor expected = expected_rows(group.rank(), size, open[0].first, columns);
          EXPECT_TRUE(
              at::equal(open[0].second->received(0, expected.sizes(), at::kFloat), expected));
          open[0].second->close();
          open.erase(open.begin());
        };
        for (int i = 0; i < count; ++i, ++n) {
          if (open.size() == PeerRows::kSlots) end();
          open.emplace_back(n, std::make_unique<PeerRowExchange>(
                                   rows, sources_of(group.rank(), size, n, columns)));
        }
        while (!open.empty()) end();
      };
      rows.reserve(at::kCPU, 4 * size * 3 * 4);
      exchange(3, 7);
      rows.reserve(at::kCPU, 4 * size * 40 * 4);  // more
      exchange(40, 7);
      rows.reserve(at::kCPU, 4);
      exchange(40, 2);  // it never shrinks
      group.barrier();
    });
  }
}

// The other rank is ahead by as many exchanges as there are slots.
TEST(PeerRows, ASlotIsNotWrittenWhileItIsRead) {
  std::atomic<bool> ahead = false;
  run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "ep");
    PeerRows rows(group);
    rows.reserve(at::kCPU, 512);
    const auto open = [&](float value) {
      return std::make_unique<PeerRowExchange>(
          rows, std::vector<Source>{{at::full({64}, value), {{1 - group.rank(), 0, 0, 256}}}});
    };
    std::vector<std::unique_ptr<PeerRowExchange>> exchanges;
    for (int n = 0; n < PeerRows::kSlots; ++n) exchanges.push_back(open(static_cast<float>(n)));
    if (group.rank() == 1) {
      exchanges.front()->close();
      ahead = true;
      exchanges.push_back(open(100.0F));
    } else {
      while (!ahead) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const at::Tensor first = exchanges.front()->received(0, {64}, at::kFloat);
      EXPECT_TRUE(at::equal(first, at::zeros({64}))) << first[0];
      exchanges.front()->close();
      exchanges.push_back(open(100.0F));
    }
    group.barrier();
  });
}

TEST(PeerRows, RefuseMoreExchangesThanSlotsAndMoreBytesThanRoom) {
  const auto opened = [](int exchanges, int64_t byte) {
    run_ranks(2, [&](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup group(backend, "ep");
      PeerRows rows(group);
      rows.reserve(at::kCPU, 512);
      std::vector<std::unique_ptr<PeerRowExchange>> open;
      for (int i = 0; i < exchanges; ++i)
        open.push_back(std::make_unique<PeerRowExchange>(
            rows, std::vector<Source>{{at::zeros({64}), {{1 - group.rank(), byte, 0, 256}}}}));
    });
  };
  EXPECT_THROW(opened(PeerRows::kSlots + 1, 0), InternalError);
  EXPECT_THROW(opened(1, 512), InternalError);
  EXPECT_NO_THROW(opened(PeerRows::kSlots, 256));
}

TEST(PeerRows, AFailingRankFreesItsPeers) {
  try {
    run_ranks(3, [](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup group(backend, "ep");
      PeerRows rows(group);
      rows.reserve(at::kCPU, 512);
      if (group.rank() == 1) throw Error("rank 1 has had enough");
      PeerRowExchange exchange(rows, {});
      exchange.received(0, {4}, at::kFloat);
    });
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 has had enough"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace megatron
