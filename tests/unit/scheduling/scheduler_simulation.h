// Drives a scheduler and a fake model as the engine does, and compares what each request gives with
// what it gives alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "fake_model.h"
#include "megatron/scheduling/scheduler.h"

namespace megatron {

class SchedulerSimulation {
 public:
  SchedulerSimulation(SchedulerConfig config, FakeOptions options,
                      PrefixIndex::Hash hash = hash_prefix)
      : options_(options),
        has_drafts_(config.draft_source != nullptr),
        scheduler_(poisoned(config), options.facts, hash),
        model_(options) {}

  RequestId submit(RequestSpec spec) {
    const RequestId id{++ids_};
    const auto refusal = scheduler_.submit(id, spec, now_ns);
    EXPECT_FALSE(refusal) << refusal->message;
    specs_.emplace(id, std::move(spec));
    return id;
  }

  // One step as the engine makes it: plans, launches, reads the one before. False: nothing was
  // planned and nothing is in flight.
  bool step() {
    now_ns += 1'000'000;
    const auto plan = scheduler_.plan(now_ns);
    scheduler_.check_invariants();
    if (plan) {
      results_.push_back(model_.apply(parse_step_plan(serialise(*plan))));
      plans.push_back(*plan);
    }
    const auto latency =
        static_cast<size_t>(scheduler_.facts().draw_latency - (has_drafts_ ? 1 : 0));
    if (results_.size() > latency || (!plan && !results_.empty()))
      read();
    else if (!plan)
      return false;
    scheduler_.check_invariants();
    return true;
  }
  void run(int most = 100000) {
    while (step()) ASSERT_GT(--most, 0) << "the schedule does not end";
    EXPECT_TRUE(scheduler_.empty()) << "a request waits for " << name(scheduler_.waits_for());
  }

  void cancel(RequestId id) {
    for (const auto& sequence : scheduler_.sequences(id)) {
      scheduler_.finish(*sequence, RequestEvent::kCancel);
      cancelled_.insert({id, sequence->choice});
    }
  }
  // Nothing is in flight afterwards.
  void settle() {
    while (!results_.empty()) read();
  }

  // All that were not cancelled gave what they give alone; the others a beginning of it.
  void check_outputs() const {
    for (const auto& [id, spec] : specs_)
      for (int32_t choice = 0; choice < spec.choices; ++choice) {
        const auto found = outputs.find({id, choice});
        const AloneOutput got = found == outputs.end() ? AloneOutput{} : found->second;
        AloneOutput alone = run_alone(options_, spec, choice);
        if (cancelled_.contains({id, choice})) {
          ASSERT_LE(got.ids.size(), alone.ids.size());
          alone.ids.resize(got.ids.size());
          ASSERT_EQ(got.ids, alone.ids);
          continue;
        }
        ASSERT_EQ(got.ids, alone.ids)
            << "request " << static_cast<uint64_t>(id) << " choice " << choice;
        ASSERT_EQ(got.log_probabilities, alone.log_probabilities);
        ASSERT_EQ(got.prompt, alone.prompt);
        ASSERT_EQ(got.finite, alone.finite);
      }
  }

  Scheduler& scheduler() { return scheduler_; }
  FakeModel& model() { return model_; }

  int64_t now_ns = 0;
  std::vector<StepPlan> plans;
  std::map<std::pair<RequestId, int32_t>, AloneOutput> outputs;
  std::map<std::pair<RequestId, int32_t>, int64_t> cached, ended_in;

 private:
  static SchedulerConfig poisoned(SchedulerConfig config) {
    config.poison_freed_blocks = true;
    return config;
  }

  void read() {
    const StepResult result = std::move(results_.front());
    results_.erase(results_.begin());
    for (StepOutput& output : scheduler_.read(result, 1'000'000)) {
      Sequence& sequence = *output.sequence;
      const std::pair key(sequence.request, sequence.choice);
      AloneOutput& so_far = outputs[key];
      so_far.prompt.insert(so_far.prompt.end(), output.scores.begin(), output.scores.end());
      const StopConditions& stop = sequence.spec().stop;
      bool ends = output.prompt_is_done && stop.max_tokens == 0;
      if (!output.draws.empty() && !output.draws.back().finite) {
        so_far.finite = false;
        output.draws.pop_back();
      }
      for (const DrawnToken& draw : output.draws) {
        so_far.ids.push_back(draw.id);
        if (draw.log_probabilities) so_far.log_probabilities.push_back(*draw.log_probabilities);
        ends = std::ranges::count(stop.end_tokens, draw.id) > 0 ||
               sequence.outputs() == stop.max_tokens;
      }
      if (!so_far.finite) {
        scheduler_.finish(sequence, RequestEvent::kError);
        continue;
      }
      cached[key] = sequence.cached_tokens;
      if (!ends) continue;
      ended_in[key] = result.step;
      scheduler_.finish(sequence, RequestEvent::kToken);
    }
  }

  FakeOptions options_;
  bool has_drafts_;  // which continue what was read
  Scheduler scheduler_;
  FakeModel model_;
  uint64_t ids_ = 0;
  std::map<RequestId, RequestSpec> specs_;
  std::set<std::pair<RequestId, int32_t>> cancelled_;
  std::vector<StepResult> results_;
};

}  // namespace megatron
