// Verification by several ranks: each reads its share, all get the same verdict.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/access_error.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "test_support.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int kRanks = 4;
constexpr int64_t kShareRows = 40000;  // 20.5 MB: about 20 blocks

void as_ranks(int size, const std::function<void(Agreement&)>& body) {
  ThreadAgreement::Room room(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      ThreadAgreement agreement(room, rank);
      body(agreement);
    });
  for (std::thread& thread : threads) thread.join();
}

class Shares : public testing::Test {
 protected:
  void SetUp() override {
    for (int64_t iteration : {1, 2, 3}) {
      TinyModel model(static_cast<uint64_t>(iteration), kShareRows);
      save_checkpoint(request_for(model, root_, iteration));
    }
  }
  fs::path tensors(int64_t iteration) const {
    return root_ / checkpoint_name(iteration) / "rank_00000.safetensors";
  }

  ScratchFolder folder_;
  fs::path root_ = folder_.path() / "run";
};

// Every bit belongs to exactly one share, whatever their number.
TEST_F(Shares, EveryDamageIsInOneShare) {
  std::mt19937_64 random(7);
  for (const fs::path& file : files_below(root_ / "iter_0000003")) {
    if (file.filename() == kManifestName) continue;
    for (int i = 0; i < 6; ++i) {
      const uint64_t bit = i == 0   ? 0
                           : i == 1 ? fs::file_size(file) * 8 - 1
                                    : random() % (fs::file_size(file) * 8);
      flip_bit(file, bit);
      for (const int n : {1, 2, 5, 16, 50}) {
        int found = 0;
        for (int share = 0; share < n; ++share) {
          VerifyOptions options;
          options.threads = 1;
          options.share = share;
          options.num_shares = n;
          found += verify_checkpoint(file.filename() == "tokenizer.json"
                                         ? file.parent_path().parent_path()
                                         : file.parent_path(),
                                     options)
                           .empty()
                       ? 0
                       : 1;
        }
        EXPECT_EQ(found, 1) << file << " bit " << bit << " of " << n;
      }
      flip_bit(file, bit);
    }
  }
}

// A share is 1/n of the bytes, but for a block; the whole is read once.
TEST_F(Shares, AreEqualAndReadOnce) {
  constexpr int kShares = 5;
  std::atomic<int> reads{0};
  set_io_hook([&](IoOp op, const fs::path& path, const fs::path&) {
    if (op == IoOp::kRead && path.extension() == ".safetensors") ++reads;
    return 0;
  });
  int total = 0;
  for (int share = 0; share < kShares; ++share) {
    reads = 0;
    VerifyOptions options;
    options.share = share;
    options.num_shares = kShares;
    int blocks = 0;
    std::mutex mutex;
    options.progress = [&] {
      const std::lock_guard<std::mutex> lock(mutex);
      ++blocks;
    };
    EXPECT_TRUE(verify_checkpoint(root_ / "iter_0000003", options).empty());
    EXPECT_GE(blocks, 3);
    EXPECT_LE(blocks, 6);
    EXPECT_LE(reads, blocks + 2);  // the file is opened, and one share reads its header
    total += blocks;
  }
  set_io_hook({});
  EXPECT_EQ(total, 20 + 2);  // and two small files
}

TEST_F(Shares, DamageInAnyShareSendsAllRanksToTheSameOlderCheckpoint) {
  const uint64_t bytes = fs::file_size(tensors(3));
  for (int share = 0; share <= kRanks; ++share) {
    SCOPED_TRACE(share);
    // The last round damages two shares of the newest and one of the next.
    std::vector<std::pair<fs::path, uint64_t>> bits = {
        {tensors(3), 8 * (bytes * static_cast<uint64_t>(2 * share + 1) / (2 * kRanks))}};
    if (share == kRanks)
      bits = {{tensors(3), 80000}, {tensors(3), 8 * (bytes - 5)}, {tensors(2), 8 * (bytes / 2)}};
    const int64_t expected = share == kRanks ? 1 : 2;
    for (const auto& [file, bit] : bits) flip_bit(file, bit);
    std::mutex mutex;
    std::vector<int64_t> chosen;
    std::set<std::vector<std::string>> warnings;
    as_ranks(kRanks, [&](Agreement& agreement) {
      const StartDecision decision =
          resolve_start({StartMode::kResume, root_, {}, {}, false}, &agreement);
      const std::lock_guard<std::mutex> lock(mutex);
      chosen.push_back(decision.checkpoint->iteration);
      warnings.insert(decision.warnings);
    });
    for (const auto& [file, bit] : bits) flip_bit(file, bit);
    EXPECT_THAT(chosen, testing::AllOf(SizeIs(kRanks), testing::Each(expected)));
    ASSERT_THAT(warnings, SizeIs(1));
    EXPECT_THAT(*warnings.begin(), SizeIs(3 - expected));
    EXPECT_THAT(warnings.begin()->front(),
                HasSubstr("iter_0000003/rank_00000.safetensors: the checksum of bytes"));
  }
}

TEST_F(Shares, ARankThatCannotReadItsShareStopsAll) {
  std::atomic<int> failed{0};
  std::atomic<bool> once{false};
  set_io_hook([&](IoOp op, const fs::path& path, const fs::path&) {
    return op == IoOp::kRead && path == tensors(3) && !once.exchange(true) ? EIO : 0;
  });
  std::mutex mutex;
  std::set<std::string> messages;
  as_ranks(kRanks, [&](Agreement& agreement) {
    try {
      resolve_start({StartMode::kResume, root_, {}, {}, false}, &agreement);
    } catch (const AccessError& error) {
      ++failed;
      const std::lock_guard<std::mutex> lock(mutex);
      messages.insert(error.what());
    }
  });
  set_io_hook({});
  EXPECT_EQ(failed, kRanks);
  ASSERT_THAT(messages, SizeIs(1));
  EXPECT_THAT(*messages.begin(),
              testing::MatchesRegex(
                  "rank [0-3] cannot verify its part: cannot open [^\n]*"
                  "iter_0000003/rank_00000.safetensors: Input/output error \\(errno 5\\)\n.*"));
}

// The configuration of a run is read before its ranks have met: without the tensors.
TEST_F(Shares, TheConfigurationAloneIsVerifiedWithoutTheTensors) {
  flip_bit(tensors(3), 8 * 9000);
  int reads = 0;
  set_io_hook([&](IoOp op, const fs::path& path, const fs::path&) {
    reads += op == IoOp::kRead && path.extension() == ".safetensors";
    return 0;
  });
  StartRequest request{StartMode::kResume, root_, {}, {}, false, CheckDepth::kConfiguration};
  EXPECT_EQ(resolve_start(request).checkpoint->iteration, 3);
  flip_bit(root_ / "iter_0000003" / "config.yaml", 3);
  EXPECT_EQ(resolve_start(request).checkpoint->iteration, 2);
  set_io_hook({});
  EXPECT_EQ(reads, 0);
}

// Several ranks replace a checkpoint, or find one in the way: all read a share of it, and its
// damage is found by any of them.
TEST_F(Shares, WhatBearsTheNameOfASaveIsReadByAllRanks) {
  const auto save = [&](bool replace) {
    std::mutex mutex;
    std::set<std::string> outcomes;
    as_ranks(kRanks, [&](Agreement& agreement) {
      TinyModel model(9, kShareRows);
      SaveRequest request = request_for(model, root_, 3);
      request.replace_existing = replace;
      request.agreement = &agreement;
      for (ShardedTensor& tensor : request.tensors) tensor.replica_id = agreement.rank();
      std::string outcome;
      try {
        for (const std::string& warning : save_checkpoint(request).warnings) outcome += warning;
      } catch (const Error& error) {
        outcome = error.what();
      }
      const std::lock_guard<std::mutex> lock(mutex);
      if (!outcome.empty()) outcomes.insert(outcome);
    });
    return outcomes;
  };
  EXPECT_THAT(save(false), ElementsAre(HasSubstr("exists already and is usable")));
  EXPECT_TRUE(holds_seed(root_ / "iter_0000003", 3, kShareRows));
  flip_bit(tensors(3), 8 * (fs::file_size(tensors(3)) - 100));
  EXPECT_THAT(save(true), ElementsAre(HasSubstr("was moved to " +
                                                (root_ / "iter_0000003.unusable-0").string())));
  EXPECT_TRUE(holds_seed(root_ / "iter_0000003", 9, kShareRows));
  EXPECT_THAT(save(true), testing::IsEmpty());
  EXPECT_THAT(names_in(root_), ElementsAre("iter_0000001", "iter_0000002", "iter_0000003",
                                           "iter_0000003.unusable-0", kLatestName));
}

}  // namespace
}  // namespace megatron
