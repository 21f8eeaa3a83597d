// Serves many requests at once: decides on rank 0 what every step computes, and reads the sampled
// tokens of one step while the next one runs.
//
// One thread owns the engine and calls step() again and again; any thread may submit requests,
// cancel them and give commands, which the next step() takes from a mailbox. The states of requests
// and of the engine are those of docs/design/engine_states.md. Without libtorch.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <variant>
#include <vector>

#include "megatron/inference/rank_group.h"
#include "megatron/scheduling/commands.h"
#include "megatron/scheduling/scheduler.h"
#include "megatron/scheduling/text_output.h"

namespace megatron {

struct EngineOptions {
  SchedulerConfig scheduler;
  int32_t max_choices = 16;
  int32_t max_stop_texts = 64;
  int64_t max_stop_text_bytes = 256;
  int32_t max_logit_bias = 1024;
  // A step whose result does not come for so long, or a rank that does not become ready, fails the
  // engine.
  int64_t step_timeout_ns = 60'000'000'000;
  // Beyond the deadline of a transition, for taking it back.
  int64_t undo_ns = 5'000'000'000;
  std::string build;              // of this program, compared with that of the other ranks
  bool check_invariants = false;  // after each step; tests
  // Does a piece of work that is of use later, and returns whether there was one: called while the
  // engine runs and nothing waits. Null: there is none.
  std::function<bool()> when_idle = {};
};

struct StepReport {
  EngineState state{};
  bool planned = false;  // a step was launched
  bool read = false;     // the result of one was read
};

class Engine {
 public:
  // Keeps references to all of them. `links`: null: one rank. `tokenizer`: null: events have no
  // text, and requests no stop texts. The engine is kStarting until the first step().
  Engine(StepRunner& runner, FollowerLinks* links, const Tokenizer* tokenizer, const Clock& clock,
         EngineOptions options = {});
  ~Engine();

  // Any thread. Never waits for a step.
  Admission submit(RequestSpec spec);
  void cancel(RequestId request);  // of one that has ended, nothing happens
  Ticket command(EngineCommand command, int64_t deadline_ns);  // from now
  EngineStats stats() const;
  const RequestLimits& limits() const { return limits_; }

  // The owner's thread. Plans and launches a step if there is work, and reads the result of the one
  // before. Waits up to `wait_ns` for that result, for a rank, or, with nothing to do and nothing
  // to tell, for the mailbox. An exception means that the engine is kFailed, and every request has
  // its event.
  StepReport step(int64_t wait_ns);
  // What happened since the last call; the events of one choice in order.
  std::vector<Event> take_events() { return std::exchange(events_, {}); }

 private:
  struct Submission {
    RequestId id{};
    RequestSpec spec;
    int64_t time_ns = 0;
  };
  struct Cancellation {
    RequestId id{};
  };
  struct Command {
    EngineCommand command;
    Ticket ticket;
    int64_t deadline_ns = 0;
  };
  using Mail = std::variant<Submission, Cancellation, Command>;

  // One choice on its way.
  struct Output {
    std::optional<TextOutput> text;
    std::vector<PositionLogProbabilities> prompt;
    int64_t prompt_wanted = 0;  // not told yet; 0: none
    int64_t first_token_ns = -1, last_token_ns = -1;
  };
  // A step that was launched and not read.
  struct Launched {
    int64_t step = 0, version = 0, time_ns = 0;
  };
  // A command that is being executed.
  struct Transition {
    enum class Phase : uint8_t {
      kFinishing,  // pause(finish): what runs goes on
      kSettling,   // steps in flight end
      kRanks,      // ranks execute `parts`
      kUndo,       // ranks take back what they did
    };
    Command command;
    Phase phase = Phase::kSettling;
    std::vector<RankTransition> parts;  // one after another
    size_t part = 0;
    int64_t undo_deadline_ns = 0;
    CommandOutcome failure;  // kUndo: what is told when it is done
  };

  bool start();
  void take_mail();
  void admit(Submission submission);
  void cancel_now(RequestId request);
  void end_expired();
  bool plan_and_launch();
  bool read_result(int64_t wait_ns);
  void check_silence();
  [[noreturn]] void fail_late_step();
  void wait_for_mail(int64_t wait_ns);
  bool works_while_idle();
  void publish_stats();

  void add_output(const StepOutput& output, int64_t version, int64_t now_ns);
  // Adds the token to the event; whether and why the text ends with it.
  // `later`: tokens behind it that the sequence has already.
  std::optional<Finish> add_token(Sequence& sequence, Output& output, const DrawnToken& draw,
                                  int64_t later, int64_t version, Event& event);
  void add_prompt(const StepOutput& given, Output& output, Event& event);
  // Ends a sequence with an event.
  void finish(Sequence& sequence, RequestEvent cause, FinishReason reason,
              const std::string& message = {});
  void end_event(Sequence& sequence, Output& output, Event& event, Finish finish,
                 RequestEvent cause);
  void finish_all(RequestEvent cause, FinishReason reason, const std::string& message = {},
                  bool queued_only = false);

  // engine_commands.cc
  void advance_commands();
  void begin_command(Command command);
  void begin_transition(Command command);
  void advance_transition();
  void advance_ranks(int64_t now_ns);
  void transition_done();
  void transition_fails(CommandOutcome outcome);
  void undo_ranks(CommandOutcome outcome);
  void advance_undo(int64_t now_ns);
  void begin_drain(Command command, EngineState next);
  void advance_drain();
  void stop(const std::vector<RequestId>& left);
  void resolve(const Command& command, CommandOutcome outcome);
  CommandOutcome outcome_of(CommandOutcome::Kind kind, std::string message = {}) const;
  std::vector<RequestId> unfinished() const;
  [[noreturn]] void fail(const RankFailure& failure);
  bool plans_steps() const;
  size_t steps_ahead() const;  // steps in flight while another one is planned

  StepRunner& runner_;
  const Tokenizer* tokenizer_;
  const Clock& clock_;
  EngineOptions options_;
  RequestLimits limits_;
  RankGroup ranks_;
  Scheduler scheduler_;

  // The owner's thread alone.
  EngineState state_ = EngineState::kStarting;
  std::string failure_;
  SuspendCommand levels_;  // while kSuspended
  std::map<std::pair<RequestId, int32_t>, Output> outputs_;
  std::deque<Launched> launched_;
  std::vector<Event> events_;
  std::deque<Command> commands_;
  std::optional<Transition> transition_;
  std::vector<Command> drains_;
  int64_t last_result_ns_ = 0;
  int64_t started_ns_ = 0;
  EngineStats counters_;
  int64_t last_finish_ns_ = 0;
  double finish_interval_ns_ = 0.0;  // a mean of the last ones; 0: unknown
  int64_t taken_choices_ = 0;        // from the mailbox since stats were published

  // Shared with other threads.
  mutable std::mutex mutex_;
  std::condition_variable mail_has_come_;
  std::deque<Mail> mail_;
  EngineStats stats_;
  int64_t mailed_choices_ = 0;  // that stats_ does not count yet
  uint64_t next_id_ = 0, submitted_ = 0, refused_ = 0;
  double wait_per_request_ns_ = 0.0;  // from the finishes so far; 0: unknown
};

}  // namespace megatron
