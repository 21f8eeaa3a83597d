#include "megatron/runtime/signals.h"

#include <gtest/gtest.h>

#include <csignal>

namespace megatron {
namespace {

TEST(Signals, TheFirstIsRemembered) {
  SignalHandler handler(SIGUSR2);
  EXPECT_EQ(handler.received(), 0);
  raise(SIGUSR2);
  EXPECT_EQ(handler.received(), SIGUSR2);
}

TEST(Signals, TheSecondLeavesAtOnce) {
  EXPECT_EXIT(
      {
        SignalHandler handler(SIGTERM);
        raise(SIGTERM);
        raise(SIGTERM);
      },
      testing::ExitedWithCode(128 + SIGTERM), "second signal");
}

}  // namespace
}  // namespace megatron
