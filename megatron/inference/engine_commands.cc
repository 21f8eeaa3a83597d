// Commands of the engine: transitions of all ranks, and how they are taken back; see engine.h.
#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/inference/engine.h"

namespace megatron {
namespace {

using Kind = CommandOutcome::Kind;

// What takes a rank's part of a transition back; null: there is nothing to take back.
std::optional<RunnerTransition> undo_of(const RankTransition& part, const SuspendCommand& levels) {
  if (!part) return std::nullopt;
  if (std::holds_alternative<SuspendRunner>(*part)) return ResumeRunner{};
  if (std::holds_alternative<ResumeRunner>(*part)) return SuspendRunner{levels};
  if (std::holds_alternative<StageWeights>(*part)) return DiscardWeights{};
  return std::nullopt;
}

bool drops_cache(const RankTransition& part) {
  if (!part) return false;
  const auto* suspend = std::get_if<SuspendRunner>(&*part);
  return suspend != nullptr && suspend->levels.cache == MemoryLevel::kDrop;
}

std::vector<RankTransition> parts_of(const EngineCommand& command, EngineState state) {
  if (const auto* suspend = std::get_if<SuspendCommand>(&command)) return {SuspendRunner{*suspend}};
  if (const auto* update = std::get_if<UpdateWeightsCommand>(&command))
    return {StageWeights{update->source}, CommitWeights{update->version}};
  if (std::holds_alternative<ResumeCommand>(command) && state == EngineState::kSuspended)
    return {ResumeRunner{}};
  return {std::nullopt};
}

bool is_pause(const EngineCommand& command, PauseMode mode) {
  const auto* pause = std::get_if<PauseCommand>(&command);
  return pause != nullptr && pause->mode == mode;
}

}  // namespace

CommandOutcome Engine::outcome_of(Kind kind, std::string message) const {
  return {.kind = kind, .state = state_, .message = std::move(message)};
}

void Engine::resolve(const Command& command, CommandOutcome outcome) {
  // Who asks for the state then finds the one that the ticket tells.
  publish_stats();
  outcome.state = state_;
  command.ticket.resolve(std::move(outcome));
}

std::vector<RequestId> Engine::unfinished() const {
  std::vector<RequestId> ids;
  for (const auto& sequence : scheduler_.sequences())
    if (sequence->state != RequestState::kQueued &&
        (ids.empty() || ids.back() != sequence->request))
      ids.push_back(sequence->request);
  return ids;
}

void Engine::advance_commands() {
  for (;;) {
    advance_drain();
    if (transition_) {
      const bool superseded = transition_->phase == Transition::Phase::kFinishing &&
                              !commands_.empty() &&
                              std::holds_alternative<DrainCommand>(commands_.front().command);
      if (superseded)
        transition_fails(outcome_of(Kind::kFailed, "the engine is draining"));
      else
        advance_transition();
    }
    const int64_t now = clock_.now_ns();
    std::erase_if(commands_, [&](const Command& waiting) {
      if (waiting.deadline_ns > now || !transition_) return false;
      resolve(waiting, outcome_of(Kind::kTimedOut, "another command was not done in time"));
      return true;
    });
    if (transition_ || commands_.empty()) return;
    Command next = std::move(commands_.front());
    commands_.pop_front();
    begin_command(std::move(next));
  }
}

void Engine::begin_command(Command command) {
  const EngineInput input = input_of(command.command);
  const EngineTransition& cell = transition(state_, input);
  EngineAnswer answer = cell.answer;
  if (answer == EngineAnswer::kSameLevels)
    answer = std::get<SuspendCommand>(command.command) == levels_ ? EngineAnswer::kAlready
                                                                  : EngineAnswer::kRefused;
  const auto* update = std::get_if<UpdateWeightsCommand>(&command.command);
  if (answer == EngineAnswer::kInPlace && update != nullptr &&
      update->version <= scheduler_.facts().weights_version) {
    const int64_t current = scheduler_.facts().weights_version;
    return resolve(command, outcome_of(Kind::kRefused, cat("version ", update->version,
                                                           " of the weights is not above the "
                                                           "current one, ",
                                                           current)));
  }
  switch (answer) {
    case EngineAnswer::kAlready:
      return resolve(command, outcome_of(Kind::kDone));
    case EngineAnswer::kRefused:
      return resolve(command,
                     outcome_of(Kind::kRefused, std::string(refusal_reason(state_, input))));
    case EngineAnswer::kShorterDeadline:
      drains_.push_back(std::move(command));
      return;
    case EngineAnswer::kMoves:
    case EngineAnswer::kInPlace:
      if (input == EngineInput::kDrain)
        begin_drain(std::move(command), cell.next);
      else
        begin_transition(std::move(command));
      return;
    default:
      MEGATRON_ASSERT(false, "a command cannot come in this state");
  }
}

void Engine::begin_transition(Command command) {
  Transition begun;
  begun.parts = parts_of(command.command, state_);
  if (is_pause(command.command, PauseMode::kFinish)) {
    begun.phase = Transition::Phase::kFinishing;
    scheduler_.set_starts_new(false);
  } else if (is_pause(command.command, PauseMode::kAbort)) {
    finish_all(RequestEvent::kPauseAbort, FinishReason::kCancelled);
  }
  begun.command = std::move(command);
  transition_ = std::move(begun);
}

void Engine::advance_transition() {
  using Phase = Transition::Phase;
  const int64_t now = clock_.now_ns();
  const bool late = now >= transition_->command.deadline_ns;
  if (transition_->phase == Phase::kFinishing && !scheduler_.has_started())
    transition_->phase = Phase::kSettling;
  if (transition_->phase == Phase::kSettling && launched_.empty()) {
    transition_->phase = Phase::kRanks;
    ranks_.begin(transition_->parts[0]);
  }
  switch (transition_->phase) {
    case Phase::kFinishing:
    case Phase::kSettling:
      if (late) {
        CommandOutcome outcome =
            outcome_of(Kind::kTimedOut, "requests were not finished at the deadline");
        outcome.unfinished = unfinished();
        transition_fails(std::move(outcome));
      }
      return;
    case Phase::kRanks:
      return advance_ranks(now);
    case Phase::kUndo:
      return advance_undo(now);
  }
}

void Engine::advance_ranks(int64_t now_ns) {
  for (;;) {
    if (const auto failure = ranks_.poll(0)) fail(*failure);
    const auto& outcomes = ranks_.outcomes();
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      const std::optional<std::string>& outcome = outcomes[static_cast<size_t>(rank)];
      if (outcome && !outcome->empty()) {
        CommandOutcome failed = outcome_of(Kind::kFailed, cat("rank ", rank, ": ", *outcome));
        failed.rank = rank;
        return undo_ranks(std::move(failed));
      }
    }
    if (!ranks_.settled()) {
      if (now_ns < transition_->command.deadline_ns) return;
      const auto missing = std::ranges::find_if(outcomes, [](const auto& o) { return !o; });
      const auto rank = static_cast<int>(missing - outcomes.begin());
      CommandOutcome failed =
          outcome_of(Kind::kTimedOut, cat("rank ", rank, " has not acknowledged at the deadline"));
      failed.rank = rank;
      return undo_ranks(std::move(failed));
    }
    if (++transition_->part == transition_->parts.size()) return transition_done();
    ranks_.begin(transition_->parts[transition_->part]);
  }
}

// Ranks that have done their part, or may still do it, take it back.
void Engine::undo_ranks(CommandOutcome outcome) {
  const RankTransition& part = transition_->parts[transition_->part];
  // New weights that some ranks compute with already cannot be taken back.
  if (part && std::holds_alternative<CommitWeights>(*part)) fail({outcome.rank, outcome.message});
  const std::optional<RunnerTransition> undo = undo_of(part, levels_);
  std::vector<bool> targets;
  for (const auto& known : ranks_.outcomes()) targets.push_back(!known || known->empty());
  if (!undo || std::ranges::count(targets, true) == 0) return transition_fails(std::move(outcome));
  if (drops_cache(part)) scheduler_.recompute_all();
  transition_->phase = Transition::Phase::kUndo;
  transition_->undo_deadline_ns =
      std::max(clock_.now_ns(), transition_->command.deadline_ns) + options_.undo_ns;
  transition_->failure = std::move(outcome);
  ranks_.begin(*undo, targets);
  advance_undo(clock_.now_ns());
}

void Engine::advance_undo(int64_t now_ns) {
  if (const auto failure = ranks_.poll(0)) fail(*failure);
  const auto& outcomes = ranks_.outcomes();
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const std::optional<std::string>& outcome = outcomes[static_cast<size_t>(rank)];
    if (outcome && !outcome->empty())
      fail({rank, cat("it could not take a command back: ", *outcome)});
    if (!outcome && now_ns >= transition_->undo_deadline_ns)
      fail({rank,
            cat("it has not taken a command back in time, after: ", transition_->failure.message)});
  }
  if (ranks_.settled()) transition_fails(std::move(transition_->failure));
}

void Engine::transition_done() {
  const Transition done = std::move(*transition_);
  transition_.reset();
  const EngineCommand& command = done.command.command;
  const EngineTransition& cell = transition(state_, input_of(command));
  if (const auto* suspend = std::get_if<SuspendCommand>(&command)) {
    levels_ = *suspend;
    if (drops_cache(done.parts[0])) scheduler_.recompute_all();
  } else if (const auto* update = std::get_if<UpdateWeightsCommand>(&command)) {
    if (update->recompute)
      scheduler_.recompute_all();
    else
      scheduler_.forget_prefixes();
    scheduler_.set_weights_version(update->version);
  }
  if (cell.answer == EngineAnswer::kMoves) state_ = cell.next;
  scheduler_.set_starts_new(true);
  resolve(done.command, outcome_of(Kind::kDone));
}

void Engine::transition_fails(CommandOutcome outcome) {
  const Transition failed = std::move(*transition_);
  transition_.reset();
  scheduler_.set_starts_new(true);
  resolve(failed.command, std::move(outcome));
}

void Engine::begin_drain(Command command, EngineState next) {
  const bool abort_queued = std::get<DrainCommand>(command.command).abort_queued;
  state_ = next;
  drains_.push_back(std::move(command));
  if (state_ == EngineState::kStopped) {
    finish_all(RequestEvent::kDrainDeadline, FinishReason::kShutdown);
    stop({});
  } else if (abort_queued) {
    finish_all(RequestEvent::kDrainDeadline, FinishReason::kShutdown, {}, /*queued_only=*/true);
  }
}

void Engine::advance_drain() {
  if (state_ != EngineState::kDraining) return;
  const int64_t deadline = std::ranges::min(drains_, {}, &Command::deadline_ns).deadline_ns;
  const bool late = clock_.now_ns() >= deadline;
  if (!late && (!scheduler_.empty() || !launched_.empty())) return;
  // A rank that is lost before it was told to leave has failed.
  if (const std::optional<RankFailure> failure = ranks_.poll(/*wait_ns=*/0)) return fail(*failure);
  std::vector<RequestId> left;
  for (const auto& sequence : scheduler_.sequences())
    if (left.empty() || left.back() != sequence->request) left.push_back(sequence->request);
  finish_all(RequestEvent::kDrainDeadline, FinishReason::kShutdown);
  state_ = transition(state_, EngineInput::kDrained).next;
  stop(left);
}

void Engine::stop(const std::vector<RequestId>& left) {
  ranks_.stop();
  for (const Command& drain : std::exchange(drains_, {})) {
    CommandOutcome outcome = outcome_of(Kind::kDone);
    outcome.unfinished = left;
    resolve(drain, std::move(outcome));
  }
}

void Engine::fail(const RankFailure& failure) {
  if (failure_.empty())
    failure_ = ranks_.size() > 1 && failure.rank >= 0
                   ? cat("rank ", failure.rank, ": ", failure.message)
                   : failure.message;
  state_ = EngineState::kFailed;
  finish_all(RequestEvent::kError, FinishReason::kInternalError, failure_);
  ranks_.stop();
  CommandOutcome outcome = outcome_of(Kind::kFailed, failure_);
  outcome.rank = failure.rank;
  std::vector<Command> waiting = std::exchange(drains_, {});
  if (transition_) waiting.push_back(std::move(transition_->command));
  transition_.reset();
  for (Command& command : std::exchange(commands_, {})) waiting.push_back(std::move(command));
  for (const Command& command : waiting) resolve(command, outcome);
  publish_stats();
  throw_error(failure_);
}

}  // namespace megatron
