// Sections on a GPU are measured by events, without synchronisation.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "megatron/runtime/device.h"
#include "megatron/runtime/section_clock.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

TEST(SectionClockGpu, MeasuresWhatTheDeviceDoes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  SectionClock clock(kGpu);
  const at::Tensor x = at::randn({2048, 2048}, kGpu);
  const auto work = [&](int products) {
    for (int i = 0; i < products; ++i) at::mm(x, x);
  };
  work(20);
  synchronize(kGpu);
  std::vector<SectionTimes> seen;
  for (int step = 0; step < 6; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    clock.begin_step();
    {
      const SectionScope scope(&clock, Section::kForward);
      work(100);
    }
    {
      const SectionScope scope(&clock, Section::kBackward);
      work(200);
      clock.begin_wait();
      work(50);
      clock.end_wait();
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_TRUE(step > 0 || seconds < 0.02) << "the host waited for " << seconds << " s";
    if (const auto times = clock.take()) seen.push_back(*times);
    if (step < 3) continue;
    // The device waits for the host: that is the host's time.
    synchronize(kGpu);
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
  }
  clock.begin_step();
  synchronize(kGpu);
  const auto last = clock.take();
  ASSERT_TRUE(last);
  const auto of = [&](Section section) { return (*last)[static_cast<size_t>(section)]; };
  EXPECT_GT(of(Section::kForward), 1.0);
  EXPECT_NEAR(of(Section::kBackward) / of(Section::kForward), 2.0, 0.4);
  EXPECT_NEAR(of(Section::kCommunication) / of(Section::kForward), 0.5, 0.2);
  EXPECT_GT(of(Section::kHost), 30.0);
  EXPECT_EQ(of(Section::kOptimizer), 0.0);
}

}  // namespace
}  // namespace megatron
