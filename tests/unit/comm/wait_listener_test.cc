#include "megatron/comm/wait_listener.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "megatron/comm/gather_texts.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Seconds between begin and end.
class Stopwatch final : public WaitListener {
 public:
  void begin_wait() override {
    EXPECT_FALSE(waiting_);
    waiting_ = true;
    begin_ = std::chrono::steady_clock::now();
  }
  void end_wait() override {
    EXPECT_TRUE(waiting_);
    waiting_ = false;
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    ++waits_;
  }
  double seconds() const { return seconds_; }
  int waits() const { return waits_; }

 private:
  bool waiting_ = false;
  std::chrono::steady_clock::time_point begin_;
  double seconds_ = 0;
  int waits_ = 0;
};

// The rank that comes first waits for the other one, in every call, also of groups made from the
// world.
TEST(WaitListener, HearsOfWaits) {
  using Call = std::function<void(const ProcessGroup&)>;
  const std::vector<std::pair<const char*, Call>> calls = {
      {"all_reduce", [](const ProcessGroup& group) { group.all_reduce(at::ones({2}))->wait(); }},
      {"all_gather",
       [](const ProcessGroup& group) { group.all_gather(at::ones({4}), at::ones({2}))->wait(); }},
      {"reduce_scatter",
       [](const ProcessGroup& group) {
         group.reduce_scatter(at::ones({2}), at::ones({4}))->wait();
       }},
      {"all_to_all",
       [](const ProcessGroup& group) {
         group.all_to_all(at::ones({2}), {1, 1}, at::ones({2}), {1, 1})->wait();
       }},
      {"broadcast", [](const ProcessGroup& group) { group.broadcast(at::ones({2}), 1)->wait(); }},
      {"messages",
       [](const ProcessGroup& group) {
         if (group.rank() == 0) group.recv(at::ones({2}), 1)->wait();
         if (group.rank() == 1) group.send(at::ones({2}), 0)->wait();
       }},
      {"barrier", [](const ProcessGroup& group) { group.barrier(); }},
  };
  for (const auto& [name, call] : calls) {
    for (const bool below : {false, true}) {
      std::array<double, 2> seconds{};
      run_ranks(2, [&, call = call](const std::shared_ptr<Backend>& backend) {
        const auto listener = std::make_shared<Stopwatch>();
        const ProcessGroup world(watch_waits(backend, listener), "world");
        EXPECT_EQ(world.size(), 2);
        EXPECT_EQ(world.rank(), backend->rank());
        const ProcessGroup group = below ? world.subgroup({0, 1}, "below") : world;
        if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
        call(group);
        EXPECT_GE(listener->waits(), 1) << name;
        seconds[static_cast<size_t>(group.rank())] = listener->seconds();
      });
      EXPECT_GT(seconds[0], 0.03) << name << " below " << below;
      EXPECT_LT(seconds[1], seconds[0]) << name << " below " << below;
    }
  }
}

TEST(GatherTexts, OfDifferentLengths) {
  run_ranks(3, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup world(backend, "world");
    const std::vector<std::string> own = {"", "a text of some length", std::string("\0x", 2)};
    EXPECT_EQ(gather_texts(world, at::kCPU, own[static_cast<size_t>(world.rank())]), own);
    EXPECT_EQ(gather_texts(world, at::kCPU, ""), std::vector<std::string>(3));
  });
  EXPECT_EQ(gather_texts({}, at::kCPU, "alone"), std::vector<std::string>{"alone"});
}

}  // namespace
}  // namespace megatron
