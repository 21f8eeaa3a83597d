// Exchanges of parts between ranks that are threads.
#include "megatron/comm/peer_mailbox.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "tests/unit/comm/mailbox_rounds.h"

namespace megatron {
namespace {

TEST(PeerMailbox, EveryPartArrivesWhereItBelongs) {
  for (const int size : {2, 4})
    run_ranks(size, [](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup group(backend, "tp");
      PeerMailbox mailbox(group);
      const at::Tensor part = at::zeros({6, 64}, at::kBFloat16);
      EXPECT_FALSE(mailbox.fits(part)) << "before it is opened";
      mailbox.open(at::kCPU, 6 * 64 * 2);
      EXPECT_EQ(mailbox.obstacle(), "");
      EXPECT_TRUE(mailbox.fits(part));
      EXPECT_FALSE(mailbox.fits(at::zeros({7, 64}, at::kBFloat16)));
      exchange_in_rounds(mailbox, group, at::kCPU, 6, 10);
      mailbox.open(at::kCPU, 12 * 64 * 2);  // larger
      exchange_in_rounds(mailbox, group, at::kCPU, 12, 5);
      mailbox.open(at::kCPU, 4);
      EXPECT_TRUE(mailbox.fits(at::zeros({12, 64}, at::kBFloat16))) << "it never shrinks";
      group.barrier();
    });
}

TEST(PeerMailbox, RefusesMoreExchangesThanSlots) {
  run_ranks(1, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup alone(backend, "tp");
    PeerMailbox mailbox(alone);
    mailbox.open(at::kCPU, 1024);
    EXPECT_FALSE(mailbox.fits(at::zeros({4}))) << "a rank alone has nobody to write to";
  });
  EXPECT_THROW(run_ranks(2,
                         [](const std::shared_ptr<Backend>& backend) {
                           const ProcessGroup group(backend, "tp");
                           PeerMailbox mailbox(group);
                           mailbox.open(at::kCPU, 1024);
                           const at::Tensor part = at::zeros({16}, at::kFloat);
                           const PeerExchange first(mailbox, part), second(mailbox, part),
                               third(mailbox, part), fourth(mailbox, part);
                         }),
               InternalError);
}

// Work that is postponed may hold an exchange whose slot others need before one of them waits.
TEST(PeerMailbox, PostponedWorkRunsBeforeItsSlotIsNeeded) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup group(backend, "tp");
    PeerMailbox mailbox(group);
    mailbox.open(at::kCPU, 1024);
    const int own = group.rank(), peer = 1 - own;
    at::Tensor late;
    auto held = std::make_shared<PeerExchange>(mailbox, at::full({16}, own, at::kFloat));
    held->post(peer, at::full({16}, own, at::kFloat));
    mailbox.postpone(1.0, [&late, peer, held] { late = held->part(peer).clone(); });
    std::weak_ptr<PeerExchange> watched = held;
    held.reset();
    std::vector<std::unique_ptr<PeerExchange>> open;
    for (int n = 0; n < PeerMailbox::kSlots; ++n) {
      EXPECT_FALSE(late.defined()) << "before exchange " << n;
      open.push_back(std::make_unique<PeerExchange>(mailbox, at::full({16}, n, at::kFloat)));
      open.back()->post(peer, at::full({16}, own + n, at::kFloat));
    }
    ASSERT_TRUE(late.defined());
    EXPECT_TRUE(watched.expired());
    EXPECT_EQ(late[0].item<float>(), static_cast<float>(peer));
    for (int n = 0; n < PeerMailbox::kSlots; ++n)
      EXPECT_EQ(open[static_cast<size_t>(n)]->part(peer)[0].item<float>(),
                static_cast<float>(peer + n));
    open.clear();
    group.barrier();
  });
}

// A rank that fails in the middle of an exchange frees those that wait for its part.
TEST(PeerMailbox, AFailingRankFreesItsPeers) {
  try {
    run_ranks(3, [](const std::shared_ptr<Backend>& backend) {
      const ProcessGroup group(backend, "tp");
      PeerMailbox mailbox(group);
      mailbox.open(at::kCPU, 1024);
      const at::Tensor part = at::full({16}, group.rank(), at::kFloat);
      PeerExchange exchange(mailbox, part);
      if (group.rank() == 1) throw Error("rank 1 has had enough");
      for (const int to : {0, 1, 2}) exchange.post(to, part);
      exchange.parts(0, 3);
    });
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 has had enough"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace megatron
