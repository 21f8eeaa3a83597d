// Collectives between threads on raw memory. The tsan preset runs it under ThreadSanitizer.
#include "megatron/comm/detail/thread_core.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

constexpr double kTimeout = 20.0;

// what() of the error that the run ends with; empty when it succeeds.
std::string error_of(int size, const std::function<void(ThreadCore&)>& body,
                     double timeout = kTimeout) {
  return megatron::error_of([&] { run_threads(size, body, timeout); });
}

template <class T>
void check_sum_and_max(DType dtype) {
  run_threads(
      4,
      [&](ThreadCore& core) {
        std::vector<T> data = {static_cast<T>(core.rank()), static_cast<T>(10 * core.rank() - 15)};
        core.all_reduce(data.data(), 2, dtype, ReduceOp::kSum);
        EXPECT_EQ(data[0], static_cast<T>(6));
        EXPECT_EQ(data[1], static_cast<T>(0));
        T value = static_cast<T>(core.rank() == 2 ? 7 : -1);
        core.all_reduce(&value, 1, dtype, ReduceOp::kMax);
        EXPECT_EQ(value, static_cast<T>(7));
      },
      kTimeout);
}

TEST(ThreadCore, AllReduce) {
  check_sum_and_max<double>(DType::kFloat64);
  check_sum_and_max<float>(DType::kFloat32);
  check_sum_and_max<int64_t>(DType::kInt64);
  check_sum_and_max<int32_t>(DType::kInt32);
}

// 256 + 1 + 1 in bf16 (8 bits): rounded after each addition the ones are lost (256 + 1 is a tie
// that goes to 256), summed in fp32 they are not.
TEST(ThreadCore, BFloat16IsSummedInFp32AndRoundedOnce) {
  run_threads(
      3,
      [](ThreadCore& core) {
        uint16_t value = core.rank() == 0 ? 0x4380 : 0x3f80;  // 256, 1, 1
        core.all_reduce(&value, 1, DType::kBFloat16, ReduceOp::kSum);
        EXPECT_EQ(value, 0x4381);  // 258
      },
      kTimeout);
}

TEST(ThreadCore, Float16SumsRoundToNearestEven) {
  struct Case {
    uint16_t a, b, sum;
  };
  const Case cases[] = {
      {0x3c00, 0x3c00, 0x4000},  // 1 + 1 = 2
      {0x6400, 0x3800, 0x6400},  // 1024 + 0.5: a tie, to even
      {0x6401, 0x3800, 0x6402},  // 1025 + 0.5: a tie, to even
      {0x0001, 0x0001, 0x0002},  // subnormals
      {0x03ff, 0x0001, 0x0400},  // into the normals
      {0x7bff, 0x7bff, 0x7c00},  // overflow
      {0xbc00, 0x3c00, 0x0000},  // -1 + 1
      {0x7c00, 0xfc00, 0x7e00},  // inf - inf
  };
  for (const Case& c : cases) {
    run_threads(
        2,
        [&](ThreadCore& core) {
          uint16_t value = core.rank() == 0 ? c.a : c.b;
          core.all_reduce(&value, 1, DType::kFloat16, ReduceOp::kSum);
          EXPECT_EQ(value & 0x7fff, c.sum & 0x7fff) << std::hex << c.a << " + " << c.b;
        },
        kTimeout);
  }
}

TEST(ThreadCore, ReductionsAddInRankOrder) {
  const float parts[] = {1e8f, 1.0f, -1e8f, 1.0f};
  const float expected = ((1e8f + 1.0f) + -1e8f) + 1.0f;
  for (int repeat = 0; repeat < 20; ++repeat) {
    run_threads(
        4,
        [&](ThreadCore& core) {
          float value = parts[core.rank()];
          core.all_reduce(&value, 1, DType::kFloat32, ReduceOp::kSum);
          EXPECT_EQ(value, expected);
        },
        kTimeout);
  }
}

TEST(ThreadCore, GatherScatterBroadcast) {
  run_threads(
      4,
      [](ThreadCore& core) {
        const int64_t mine[2] = {core.rank(), core.rank() + 100};
        std::vector<int64_t> all(8);
        core.all_gather(all.data(), mine, 2, DType::kInt64);
        EXPECT_EQ(all, (std::vector<int64_t>{0, 100, 1, 101, 2, 102, 3, 103}));

        std::vector<float> input(8);
        std::iota(input.begin(), input.end(), 0.0f);
        float part[2] = {};
        core.reduce_scatter(part, input.data(), 2, DType::kFloat32, ReduceOp::kSum);
        EXPECT_EQ(part[0], 8.0f * core.rank());
        EXPECT_EQ(part[1], 8.0f * core.rank() + 4.0f);

        uint8_t bytes[3] = {};
        if (core.rank() == 2) std::memcpy(bytes, "abc", 3);
        core.broadcast(bytes, 3, DType::kUInt8, 2);
        EXPECT_EQ(std::memcmp(bytes, "abc", 3), 0);
      },
      kTimeout);
}

TEST(ThreadCore, AllToAllWithUnequalSizes) {
  run_threads(
      3,
      [](ThreadCore& core) {
        // Rank r sends q + 1 elements of value 10 r + q to rank q.
        std::vector<int64_t> input, input_counts, output_counts(3, core.rank() + 1), expected;
        for (int q = 0; q < 3; ++q) {
          input_counts.push_back(q + 1);
          for (int i = 0; i <= q; ++i) input.push_back(10 * core.rank() + q);
          for (int i = 0; i <= core.rank(); ++i) expected.push_back(10 * q + core.rank());
        }
        std::vector<int64_t> output(expected.size());
        core.all_to_all(output.data(), output_counts, input.data(), input_counts, DType::kInt64);
        EXPECT_EQ(output, expected);
      },
      kTimeout);
}

TEST(ThreadCore, SendAndReceiveKeepTheirOrder) {
  run_threads(
      3,
      [](ThreadCore& core) {
        const int next = (core.rank() + 1) % 3, previous = (core.rank() + 2) % 3;
        for (int i = 0; i < 10; ++i) {
          const double value = 100.0 * core.rank() + i;
          core.send(&value, 1, DType::kFloat64, next);
        }
        for (int i = 0; i < 10; ++i) {
          double value = 0;
          core.recv(&value, 1, DType::kFloat64, previous);
          EXPECT_EQ(value, 100.0 * previous + i);
        }
      },
      kTimeout);
}

TEST(ThreadCore, SubgroupsWorkBesideTheirParent) {
  run_threads(
      6,
      [](ThreadCore& core) {
        const int first = core.rank() % 2;
        ThreadCore half = core.subgroup({first, first + 2, first + 4}, "half");
        EXPECT_EQ(half.size(), 3);
        EXPECT_EQ(half.rank(), core.rank() / 2);
        int64_t value = core.rank();
        half.all_reduce(&value, 1, DType::kInt64, ReduceOp::kSum);
        EXPECT_EQ(value, core.rank() % 2 == 0 ? 6 : 9);
        ThreadCore alone = half.subgroup({half.rank()}, "alone");
        EXPECT_EQ(alone.size(), 1);
        alone.barrier();
        core.all_reduce(&value, 1, DType::kInt64, ReduceOp::kSum);
        EXPECT_EQ(value, 45);
      },
      kTimeout);
}

TEST(ThreadCore, TheSameSubgroupCanBeMadeAgainAtAnyTime) {
  run_threads(
      2,
      [](ThreadCore& core) {
        std::vector<ThreadCore> pairs;  // a rank that is ahead must not join in another's place
        for (int i = 0; i < 200; ++i) pairs.push_back(core.subgroup({0, 1}, "pair"));
        for (int i = 0; i < 200; ++i) {
          int64_t value = i;
          pairs[i].all_reduce(&value, 1, DType::kInt64, ReduceOp::kSum);
          EXPECT_EQ(value, 2 * i);
        }
      },
      kTimeout);
}

TEST(ThreadCore, EmptyBuffersAreLegal) {
  run_threads(
      2,
      [](ThreadCore& core) {
        core.all_reduce(nullptr, 0, DType::kFloat32, ReduceOp::kSum);
        core.all_gather(nullptr, nullptr, 0, DType::kFloat32);
        core.broadcast(nullptr, 0, DType::kFloat32, 0);
        core.send(nullptr, 0, DType::kFloat32, 1 - core.rank());
        core.recv(nullptr, 0, DType::kFloat32, 1 - core.rank());
      },
      kTimeout);
}

TEST(ThreadCore, DifferentCallsAreNamed) {
  const std::string ops = error_of(2, [](ThreadCore& core) {
    float data[4] = {}, out[8] = {};
    if (core.rank() == 0) {
      core.all_reduce(data, 4, DType::kFloat32, ReduceOp::kSum);
    } else {
      core.all_gather(out, data, 4, DType::kFloat32);
    }
  });
  EXPECT_EQ(ops,
            "ranks of a group made different calls: rank 0 all_reduce of 4 x F32, rank 1 "
            "all_gather of 4 x F32");

  const std::string sizes = error_of(3, [](ThreadCore& core) {
    std::vector<float> data(4);
    core.all_reduce(data.data(), core.rank() == 2 ? 3 : 4, DType::kFloat32, ReduceOp::kSum);
  });
  EXPECT_EQ(sizes,
            "ranks of a group made different calls: rank 0 all_reduce of 4 x F32, rank 2 "
            "all_reduce of 3 x F32");

  const std::string roots = error_of(2, [](ThreadCore& core) {
    int64_t value = 0;
    core.broadcast(&value, 1, DType::kInt64, core.rank());
  });
  EXPECT_NE(roots.find("broadcast of 1 x I64 (argument 1)"), std::string::npos) << roots;

  const std::string counts = error_of(2, [](ThreadCore& core) {
    int64_t in[4] = {}, out[4] = {};
    core.all_to_all(out, {2, 2}, in, {core.rank() == 0 ? 1 : 2, 2}, DType::kInt64);
  });
  EXPECT_EQ(counts, "all_to_all: rank 0 sends 1 elements to rank 0, which expects 2");

  const std::string received = error_of(2, [](ThreadCore& core) {
    int64_t value = 0;
    if (core.rank() == 0) core.send(&value, 1, DType::kInt64, 1);
    if (core.rank() == 1) core.recv(&value, 2, DType::kInt32, 0);
  });
  EXPECT_EQ(received, "recv from rank 0 expects 2 x I32, rank 0 sent 1 x I64");
}

TEST(ThreadCore, UnsupportedTypesAndPeersAreNamed) {
  EXPECT_NE(error_of(2,
                     [](ThreadCore& core) {
                       uint8_t value = 0;
                       core.all_reduce(&value, 1, DType::kUInt8, ReduceOp::kSum);
                     })
                .find("reduction of U8 is not supported between CPU ranks"),
            std::string::npos);
  EXPECT_EQ(error_of(2, [](ThreadCore& core) { core.send(nullptr, 0, DType::kUInt8, 2); }),
            "send to rank 2 in a group of 2 ranks");
  EXPECT_EQ(error_of(0, [](ThreadCore&) {}), "a run on threads needs at least 1 rank, got 0");
}

TEST(ThreadCore, ARankThatThrowsReleasesTheOthers) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> released = 0;
  const std::string error = error_of(4, [&](ThreadCore& core) {
    const int first = core.rank() / 2 * 2;
    ThreadCore half = core.subgroup({first, first + 1}, "half");
    if (core.rank() == 3) throw Error("rank 3 is out of luck");
    try {
      if (core.rank() == 0) {
        int value = 0;
        half.recv(&value, 1, DType::kInt32, 1);  // never sent
      } else {
        core.barrier();
      }
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("cancelled because rank 3 failed"),
                std::string::npos);
      ++released;
      throw;
    }
  });
  EXPECT_EQ(error, "rank 3 is out of luck");
  EXPECT_EQ(released, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(ThreadCore, ARankThatGaveUpIsNotTakenForOneThatIsThere) {
  std::atomic<bool> gave_up = false;
  std::string second;
  const std::string error = error_of(3, [&](ThreadCore& core) {
    if (core.rank() == 2) throw Error("rank 2 is out of luck");
    ThreadCore pair = core.subgroup({0, 1}, "pair");
    if (core.rank() == 0) {
      try {
        pair.barrier();
      } catch (const Error&) {
        gave_up = true;
        throw;
      }
    }
    while (!gave_up) std::this_thread::yield();
    try {
      pair.barrier();  // rank 0 has left this call
    } catch (const Error& error) {
      second = error.what();
      throw;
    }
  });
  EXPECT_EQ(error, "rank 2 is out of luck");
  EXPECT_EQ(second, "barrier was cancelled because rank 2 failed");
}

TEST(ThreadCore, ARankThatHasReturnedIsNotWaitedFor) {
  const std::string error = error_of(2, [](ThreadCore& core) {
    if (core.rank() == 0) core.barrier();
  });
  EXPECT_EQ(error, "barrier waits for rank 1, which has already returned");
}

TEST(ThreadCore, WaitsEndAtTheirDeadline) {
  std::atomic<bool> stop = false;
  const std::string error = error_of(
      3,
      [&](ThreadCore& core) {
        if (core.rank() == 1) {
          while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        try {
          core.barrier();
        } catch (...) {
          stop = true;
          throw;
        }
      },
      0.2);
  EXPECT_NE(error.find("barrier timed out after 0.2 s: rank 1 did not arrive"), std::string::npos)
      << error;
  EXPECT_NE(error.find("\nhint: "), std::string::npos);
}

TEST(ThreadCore, OneOfTwoRanksWhoseWaitEndsTogetherSaysWhoIsMissing) {
  std::mutex mutex;
  std::vector<std::string> errors;
  std::atomic<int> here = 0, left = 0;
  error_of(
      3,
      [&](ThreadCore& core) {
        if (core.rank() == 1) {
          while (left < 2) std::this_thread::yield();
          return;
        }
        ++here;
        while (here < 2) std::this_thread::yield();
        try {
          core.barrier();
        } catch (const Error& error) {
          {
            const std::lock_guard lock(mutex);
            errors.push_back(error.what());
          }
          ++left;
          while (left < 2) std::this_thread::yield();  // neither has returned with its failure yet
          throw;
        }
      },
      0.2);
  ASSERT_EQ(errors.size(), 2U);
  EXPECT_TRUE(errors[0].starts_with("barrier timed out after 0.2 s: rank 1 did not arrive"))
      << errors[0];
  EXPECT_TRUE(errors[1].starts_with("barrier was cancelled because rank ")) << errors[1];
}

TEST(ThreadCore, RanksThatWaitForEachOtherAreNamedAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of(3, [](ThreadCore& core) {
    if (core.rank() == 2) return;
    ThreadCore pair = core.subgroup({0, 1}, "pair"), other = core.subgroup({0, 1}, "other");
    float x = 0;
    pair.barrier();
    if (core.rank() == 0) pair.barrier();
    other.all_reduce(&x, 1, DType::kFloat32, ReduceOp::kSum);  // rank 1 is here, rank 0 before it
  });
  EXPECT_NE(error.find("ranks wait for each other: rank "), std::string::npos) << error;
  EXPECT_NE(error.find("rank 0 in barrier for rank 1"), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1 in all_reduce for rank 0"), std::string::npos) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(kTimeout / 2));
}

// A rank that goes on after an error of one call must not disturb peers that are still inside it.
TEST(ThreadCore, AFailedCallLeavesTheGroupUsable) {
  run_threads(
      4,
      [](ThreadCore& core) {
        for (int i = 0; i < 50; ++i) {
          std::vector<int64_t> in(4, core.rank()), out(4);
          const std::vector<int64_t> counts(4, 1);
          std::vector<int64_t> wrong = counts;
          if (core.rank() == 2) wrong[1] = 0;
          try {
            core.all_to_all(out.data(), wrong, in.data(), counts, DType::kInt64);
            EXPECT_NE(core.rank(), 2);
          } catch (const Error&) {
            EXPECT_EQ(core.rank(), 2);
          }
          int64_t one = 1;
          core.all_reduce(&one, 1, DType::kInt64, ReduceOp::kSum);
          EXPECT_EQ(one, 4);
        }
      },
      kTimeout);
}

}  // namespace
}  // namespace megatron
