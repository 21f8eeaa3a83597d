// Messages between ranks over TCP.
#include "megatron/inference/rank_sockets.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

constexpr int64_t kLong = 20'000'000'000;

TEST(RankSocket, BringsMessagesOfAnySizeInOrder) {
  RankSockets leader("127.0.0.1", 3);
  EXPECT_EQ(leader.num_ranks(), 3);
  leader.send(1, "before it came");
  RankSocket one(leader.address(), 1), two(leader.address(), 2);
  EXPECT_EQ(one.receive(kLong), "before it came");
  const std::string large(5'000'000, 'x');
  leader.send(2, large);
  leader.send(2, "");
  leader.send(2, "after");
  EXPECT_EQ(two.receive(kLong), large);
  EXPECT_EQ(two.receive(kLong), "");
  EXPECT_EQ(two.receive(kLong), "after");
  EXPECT_EQ(two.receive(0), std::nullopt);
  for (int i = 0; i < 100; ++i) one.send(std::to_string(i));
  for (int i = 0; i < 100; ++i) {
    const auto message = leader.receive(kLong);
    ASSERT_TRUE(message);
    EXPECT_EQ(message->rank, 1);
    EXPECT_EQ(message->bytes, std::to_string(i));
    EXPECT_FALSE(message->lost);
  }
  EXPECT_FALSE(leader.receive(0));
}

TEST(RankSocket, TellsThatTheOtherEndIsLost) {
  auto leader = std::make_unique<RankSockets>("127.0.0.1", 3);
  auto one = std::make_unique<RankSocket>(leader->address(), 1);
  RankSocket two(leader->address(), 2);
  one->send("last words");
  one.reset();
  EXPECT_EQ(leader->receive(kLong)->bytes, "last words");
  const auto lost = leader->receive(kLong);
  ASSERT_TRUE(lost);
  EXPECT_TRUE(lost->lost);
  EXPECT_EQ(lost->rank, 1);
  leader->send(1, "nobody reads this");
  leader->send(2, "stop");
  leader.reset();
  EXPECT_EQ(two.receive(kLong), "stop") << "what was sent is not lost";
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(error_of([&] { two.receive(kLong); }), "the connection to rank 0 has ended");
}

TEST(RankSocket, StrangersAreTurnedAway) {
  RankSockets leader("127.0.0.1", 2);
  std::string other = leader.address();
  other.back() = other.back() == '0' ? '1' : '0';
  RankSocket stranger(other, 1), beyond(leader.address(), 2);
  EXPECT_EQ(error_of([&] { stranger.receive(kLong); }), "the connection to rank 0 has ended");
  EXPECT_EQ(error_of([&] { beyond.receive(kLong); }), "the connection to rank 0 has ended");
  RankSocket one(leader.address(), 1);
  one.send("hello");
  EXPECT_EQ(leader.receive(kLong)->bytes, "hello");
  RankSocket again(leader.address(), 1);
  EXPECT_EQ(error_of([&] { again.receive(kLong); }), "the connection to rank 0 has ended");
}

TEST(RankSocket, AddressesThatAreWrongAreNamed) {
  EXPECT_NE(error_of([] { RankSockets("203.0.113.1", 2); }).find("rank 0 cannot listen on 203."),
            std::string::npos);
  EXPECT_NE(error_of([] {
              RankSocket("127.0.0.1 1 secret", 1);
            }).find("rank 0 cannot be reached at 127.0.0.1:1"),
            std::string::npos);
}

}  // namespace
}  // namespace megatron
