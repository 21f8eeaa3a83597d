// An engine without a model for tests of the server: replies are scripted or made up from the
// prompt, a token of each running text per step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "megatron/scheduling/text_output.h"
#include "megatron/serving/served_model.h"
#include "megatron/serving/service.h"

namespace megatron {

struct FakeEngineOptions {
  int64_t step_ns = 1'000'000;  // between two steps
  int32_t max_running = 64;
  int32_t max_queued = 256;  // choices
  bool stop_early = true;    // texts end by themselves, with the end token after some tokens
  int64_t phases = 1;        // a text gets a token in every so many-th step, texts in turn
  bool stamp = false;        // the text of an event is its time
};

class FakeEngine final : public EngineService {
 public:
  // The tokens of a choice, without the end token; beyond them the text ends.
  using Script = std::function<std::vector<int32_t>(const RequestSpec& spec, int32_t choice)>;

  FakeEngine(const Tokenizer& tokenizer, RequestLimits limits, FakeEngineOptions options = {});
  ~FakeEngine() override;

  void set_script(Script script);  // before the first request
  // Ends every text with that reason from now on; kLength: back to usual.
  void fail_with(FinishReason reason) { fail_with_ = reason; }
  void set_state(EngineState state);

  Admission submit(RequestSpec spec) override;
  void cancel(RequestId request) override;
  Ticket command(EngineCommand command, int64_t deadline_ns) override;
  EngineStats stats() const override;
  void set_listener(Listener listener) override { listener_ = std::move(listener); }

  // What was submitted last.
  RequestSpec last_spec() const;

 private:
  struct Text;
  void run();
  std::vector<Event> step();
  void take_token(Text& text, Event& event);
  void finish(Text& text, Event& event, FinishReason reason);
  std::vector<int32_t> reply(const RequestSpec& spec, int32_t choice) const;

  const Tokenizer& tokenizer_;
  const RequestLimits limits_;
  const FakeEngineOptions options_;
  Script script_;
  Listener listener_;
  std::atomic<FinishReason> fail_with_{FinishReason::kLength};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Text>> queued_;
  std::vector<std::shared_ptr<Text>> running_;
  EngineStats stats_;
  RequestSpec last_spec_;
  uint64_t next_id_ = 1;
  bool stopped_ = false;
  std::thread thread_;
};

// The number that the fake reports for an id.
PositionLogProbabilities fake_log_probabilities(int32_t id, int32_t top, int64_t vocab_size);

}  // namespace megatron
