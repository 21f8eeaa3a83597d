// An engine on a fake model, with other ranks that the same thread runs in turns, and everything
// that clients see.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_runner.h"
#include "megatron/inference/engine.h"

namespace megatron {

constexpr int64_t kMillisecond = 1'000'000, kSecond = 1'000'000'000;

inline std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

// What one choice got.
struct Received {
  std::vector<GeneratedToken> tokens;
  std::string text;
  std::vector<PositionLogProbabilities> prompt;
  std::optional<Finish> finish;
  int64_t last_ns = -1;
  bool one_version = false;  // the weights did not change from its submission to its end
};

class EngineHarness {
 public:
  EngineHarness(const FakeOptions& model, EngineOptions options = {}, int ranks = 1,
                const Tokenizer* tokenizer = nullptr, int64_t now_ns = 0,
                const std::function<StepRunner&(StepRunner&)>& around = {})
      : clock(now_ns), model_(model), tokenizer_(tokenizer) {
    options.check_invariants = true;
    options.scheduler.poison_freed_blocks = true;
    options.build = "here";
    options_ = options;
    for (int rank = 0; rank < ranks; ++rank)
      runners.push_back(std::make_unique<FakeRunner>(model, clock));
    if (ranks > 1) links_ = std::make_unique<LocalLinks>(ranks);
    for (int rank = 1; rank < ranks; ++rank) {
      ends_.push_back(std::make_unique<LocalLink>(*links_, rank));
      followers_.push_back(
          std::make_unique<Follower>(*ends_.back(), *runners[static_cast<size_t>(rank)], "here"));
    }
    StepRunner& first = around ? around(*runners[0]) : *runners[0];
    engine = std::make_unique<Engine>(first, links_.get(), tokenizer, clock, options);
    tick(0);  // ranks meet
  }

  // Time passes, every rank does something, and events are received. False: the engine has failed.
  bool tick(int64_t ns = kMillisecond) {
    clock.advance(ns);
    for (size_t i = 0; i < followers_.size(); ++i) pump(i);
    try {
      engine->step(0);
    } catch (const Error& error) {
      failure = error.what();
    }
    for (size_t i = 0; i < followers_.size(); ++i) pump(i);
    receive();
    return failure.empty();
  }
  void ticks(int count) {
    for (int i = 0; i < count && tick(); ++i) {
    }
  }
  // Until no request is left.
  void finish_all(int most = 100000) {
    while (open > 0 && tick()) ASSERT_GT(--most, 0) << "requests do not end";
  }

  RequestId submit(const RequestSpec& spec) {
    const Admission admission = engine->submit(spec);
    EXPECT_TRUE(admission.id) << admission.refusal->message;
    accept(*admission.id, spec);
    return *admission.id;
  }
  void accept(RequestId id, const RequestSpec& spec) {
    specs.emplace(id, spec);
    version_at_submission_[id] = engine->stats().weights_version;
    open += spec.choices;
  }
  // Gives a command and lets time pass until its outcome is known.
  CommandOutcome command(EngineCommand command, int64_t deadline_ns = kSecond,
                         int64_t tick_ns = kMillisecond) {
    const Ticket ticket = engine->command(std::move(command), deadline_ns);
    const int64_t begin = clock.now_ns();
    while (!ticket.outcome()) {
      tick(tick_ns);
      if (clock.now_ns() - begin > deadline_ns + 6 * kSecond) {
        ADD_FAILURE() << "a ticket has no outcome";
        return {};
      }
    }
    took_ns = clock.now_ns() - begin;
    return *ticket.outcome();
  }

  // A rank whose process has ended.
  void kill(int rank) {
    followers_[static_cast<size_t>(rank - 1)].reset();
    links_->send_from({rank, "", true});
  }

  // Each choice has ended once, and gave what its request gives alone, or a beginning of it.
  void check_outputs() const;
  // No block, slot or host block is held.
  void check_empty() const {
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.queued + stats.running + stats.preempted, 0);
    EXPECT_EQ(stats.blocks_held, 0);
  }

  const Received& of(RequestId id, int32_t choice = 0) const { return received.at({id, choice}); }
  EngineState state() const { return engine->stats().state; }

  FakeClock clock;
  std::vector<std::unique_ptr<FakeRunner>> runners;
  std::unique_ptr<Engine> engine;
  std::map<RequestId, RequestSpec> specs;
  std::map<std::pair<RequestId, int32_t>, Received> received;
  int64_t open = 0;  // choices without an end
  std::string failure;
  int64_t took_ns = 0;  // the last command

 private:
  void pump(size_t i) {
    if (!followers_[i]) return;
    try {
      for (int turn = 0; turn < 4; ++turn)
        if (!followers_[i]->pump(0)) return followers_[i].reset();
    } catch (const Error& error) {
      followers_[i]->tell_failure(error.what());
      followers_[i].reset();
    }
  }
  void receive();

  std::map<RequestId, int64_t> version_at_submission_;
  FakeOptions model_;
  EngineOptions options_;
  const Tokenizer* tokenizer_;
  std::unique_ptr<LocalLinks> links_;
  std::vector<std::unique_ptr<LocalLink>> ends_;
  std::vector<std::unique_ptr<Follower>> followers_;
};

}  // namespace megatron
