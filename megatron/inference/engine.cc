#include "megatron/inference/engine.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "megatron/base/check.h"

namespace megatron {
namespace {

RequestLimits limits_of(const RunnerFacts& facts, const EngineOptions& options) {
  RequestLimits limits;
  limits.vocab_size = facts.vocab_size;
  // What was admitted must fit into the whole cache.
  limits.max_positions = facts.block_size * facts.device_blocks;
  if (facts.max_positions > 0)
    limits.max_positions = std::min(limits.max_positions, facts.max_positions);
  limits.hidden_size = facts.hidden_size;
  limits.most_together = std::max<int64_t>(options.scheduler.max_step_tokens - facts.slots + 1, 1);
  limits.takes_state_input = facts.takes_state_input;
  limits.needs_state_input = facts.needs_state_input;
  limits.num_adapters = facts.num_adapters;
  limits.max_choices = options.max_choices;
  limits.max_stop_texts = options.max_stop_texts;
  limits.max_stop_text_bytes = options.max_stop_text_bytes;
  limits.max_logit_bias = options.max_logit_bias;
  return limits;
}

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::ranges::find(ids, id) != ids.end();
}

}  // namespace

Engine::Engine(StepRunner& runner, FollowerLinks* links, const Tokenizer* tokenizer,
               const Clock& clock, EngineOptions options)
    : runner_(runner),
      tokenizer_(tokenizer),
      clock_(clock),
      options_(std::move(options)),
      limits_(limits_of(runner.facts(), options_)),
      ranks_(runner, links, clock),
      scheduler_(options_.scheduler, runner.facts()) {
  started_ns_ = clock_.now_ns();
  publish_stats();
}

Engine::~Engine() = default;

// -- the mailbox, any thread

Admission Engine::submit(RequestSpec spec) {
  const auto refuse = [](Refusal refusal) { return Admission{std::nullopt, std::move(refusal)}; };
  std::optional<Refusal> found = check_request(spec, limits_);
  if (!found && tokenizer_ == nullptr && !spec.stop.stop_texts.empty())
    found = Refusal{Refusal::Kind::kInvalid, "stop", "stop texts need a tokenizer", 0};
  const std::lock_guard lock(mutex_);
  ++submitted_;
  if (!found && transition(stats_.state, EngineInput::kSubmit).answer == EngineAnswer::kUnavailable)
    found = Refusal{Refusal::Kind::kUnavailable, "",
                    std::string(refusal_reason(stats_.state, EngineInput::kSubmit)), 0};
  const int64_t waiting = stats_.queued + mailed_choices_;
  if (!found && waiting + spec.choices > options_.scheduler.max_waiting) {
    const double seconds = static_cast<double>(waiting) * wait_per_request_ns_ / 1e9;
    found = Refusal{
        Refusal::Kind::kQueueFull, "",
        cat(waiting, " requests are waiting, of ", options_.scheduler.max_waiting, " at most"),
        static_cast<int64_t>(std::clamp(seconds, 1.0, 60.0) * 1e9)};
  }
  if (found) {
    ++refused_;
    return refuse(std::move(*found));
  }
  const RequestId id{++next_id_};
  mailed_choices_ += spec.choices;
  mail_.push_back(Submission{id, std::move(spec), clock_.now_ns()});
  mail_has_come_.notify_one();
  return {id, std::nullopt};
}

void Engine::cancel(RequestId request) {
  const std::lock_guard lock(mutex_);
  mail_.push_back(Cancellation{request});
  mail_has_come_.notify_one();
}

Ticket Engine::command(EngineCommand command, int64_t deadline_ns) {
  const Ticket ticket;
  const std::lock_guard lock(mutex_);
  const int64_t now = clock_.now_ns();
  const int64_t most = std::numeric_limits<int64_t>::max() - now;
  mail_.push_back(
      Command{std::move(command), ticket, now + std::clamp<int64_t>(deadline_ns, 0, most)});
  mail_has_come_.notify_one();
  return ticket;
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

// -- steps, the owner's thread

StepReport Engine::step(int64_t wait_ns) {
  StepReport report;
  if (state_ == EngineState::kFailed || state_ == EngineState::kStopped) {
    take_mail();
    advance_commands();
    wait_for_mail(wait_ns);
    return {.state = state_};
  }
  const EngineState before = state_;
  try {
    if (state_ == EngineState::kStarting && !start()) return {.state = state_};
    take_mail();
    advance_commands();
    end_expired();
    if (const auto failure = ranks_.poll(0)) fail(*failure);
    if (plans_steps() && launched_.size() <= steps_ahead()) report.planned = plan_and_launch();
    if (launched_.size() > steps_ahead() || (!report.planned && !launched_.empty())) {
      report.read = read_result(wait_ns);
      check_silence();
    } else if (!report.planned && transition_ && transition_->phase >= Transition::Phase::kRanks) {
      if (const auto failure = ranks_.poll(wait_ns)) fail(*failure);
    } else if (!report.planned && events_.empty() && state_ == before) {
      if (!works_while_idle()) wait_for_mail(wait_ns);
    }
    advance_commands();
    if (options_.check_invariants) scheduler_.check_invariants();
  } catch (const std::exception& error) {
    if (state_ != EngineState::kFailed) fail({0, error.what()});
    throw;
  }
  publish_stats();
  report.state = state_;
  return report;
}

bool Engine::works_while_idle() {
  if (state_ != EngineState::kRunning || transition_ || !options_.when_idle) return false;
  {
    const std::lock_guard lock(mutex_);
    if (!mail_.empty()) return true;
  }
  return options_.when_idle();
}

// Ranks meet in the first step, so that commands are answered meanwhile.
bool Engine::start() {
  take_mail();
  advance_commands();
  if (state_ != EngineState::kStarting) return false;
  if (auto failure = ranks_.meet(started_ns_ + options_.step_timeout_ns, options_.build))
    fail(*failure);
  state_ = transition(state_, EngineInput::kStarted).next;
  last_result_ns_ = clock_.now_ns();
  publish_stats();
  return true;
}

size_t Engine::steps_ahead() const {
  const RunnerFacts& facts = scheduler_.facts();
  // Drafts continue what was read.
  const bool reads = facts.launch_waits || options_.scheduler.draft_source;
  return static_cast<size_t>(facts.draw_latency - (reads ? 1 : 0));
}

bool Engine::plans_steps() const {
  if (state_ != EngineState::kRunning && state_ != EngineState::kDraining) return false;
  return !transition_ || transition_->phase == Transition::Phase::kFinishing;
}

void Engine::take_mail() {
  std::deque<Mail> mail;
  {
    const std::lock_guard lock(mutex_);
    mail.swap(mail_);
  }
  for (Mail& one : mail) {
    if (auto* submission = std::get_if<Submission>(&one))
      admit(std::move(*submission));
    else if (auto* cancellation = std::get_if<Cancellation>(&one))
      cancel_now(cancellation->id);
    else
      commands_.push_back(std::move(std::get<Command>(one)));
  }
  if (!mail.empty()) publish_stats();
}

void Engine::admit(Submission submission) {
  const RequestSpec& spec = submission.spec;
  std::shared_ptr<const StopAutomaton> automaton;
  if (!spec.stop.stop_texts.empty())
    automaton = std::make_shared<const StopAutomaton>(spec.stop.stop_texts);
  const int32_t choices = spec.choices;
  taken_choices_ += choices;
  // The queue was asked when it was submitted; some more may wait now.
  const std::optional<Refusal> refusal =
      scheduler_.submit(submission.id, std::move(submission.spec), submission.time_ns);
  MEGATRON_ASSERT(!refusal, "a request was taken and cannot be queued");
  for (int32_t choice = 0; choice < choices; ++choice) {
    const std::shared_ptr<Sequence> sequence = scheduler_.sequence(submission.id, choice);
    Output& output = outputs_[{submission.id, choice}];
    if (tokenizer_ != nullptr) output.text.emplace(*tokenizer_, sequence->spec().stop, automaton);
    output.prompt_wanted = sequence->prompt - sequence->scored;
  }
  for (const auto& sequence : scheduler_.sequences(submission.id))
    if (sequence->grammar && !sequence->grammar->failure().empty())
      finish(*sequence, RequestEvent::kError, FinishReason::kGrammar, sequence->grammar->failure());
  // It was taken in a state that has passed.
  if (state_ == EngineState::kDraining || state_ == EngineState::kStopped)
    for (const auto& sequence : scheduler_.sequences(submission.id))
      finish(*sequence, RequestEvent::kDrainDeadline, FinishReason::kShutdown);
  if (state_ == EngineState::kFailed)
    for (const auto& sequence : scheduler_.sequences(submission.id))
      finish(*sequence, RequestEvent::kError, FinishReason::kInternalError, failure_);
}

void Engine::cancel_now(RequestId request) {
  for (const auto& sequence : scheduler_.sequences(request))
    finish(*sequence, RequestEvent::kCancel, FinishReason::kCancelled);
}

void Engine::end_expired() {
  for (const auto& sequence : scheduler_.expired(clock_.now_ns()))
    finish(*sequence, RequestEvent::kDeadline, FinishReason::kDeadline);
}

bool Engine::plan_and_launch() {
  const int64_t now = clock_.now_ns();
  const std::optional<StepPlan> plan = scheduler_.plan(now);
  if (!plan) {
    MEGATRON_ASSERT(scheduler_.num_running() == 0 || !launched_.empty(), scheduler_.num_running(),
                    " requests run and no step can be planned; the first that waits needs ",
                    name(scheduler_.waits_for()));
    return false;
  }
  if (launched_.empty()) last_result_ns_ = now;
  launched_.push_back({plan->step, plan->weights_version, now});
  ++counters_.steps;
  counters_.step_tokens += static_cast<uint64_t>(plan->rows());
  counters_.step_budget += static_cast<uint64_t>(
      std::max<int64_t>(options_.scheduler.max_step_tokens, scheduler_.facts().slots));
  ranks_.launch(*plan);
  return true;
}

bool Engine::read_result(int64_t wait_ns) {
  const std::optional<StepResult> result = ranks_.take(wait_ns);
  if (!result) return false;
  const Launched step = launched_.front();
  const int64_t now = clock_.now_ns();
  // With a step in flight before it, it ran from the end of that one.
  const int64_t duration = now - std::max(step.time_ns, last_result_ns_);
  last_result_ns_ = now;
  // Where a launch waits for its step, nobody could look before.
  if (duration >= options_.step_timeout_ns) fail_late_step();
  launched_.pop_front();
  counters_.step.add(duration);
  for (const StepOutput& output : scheduler_.read(*result, duration))
    add_output(output, step.version, now);
  return true;
}

// A step that does not end fails the engine, with what is known of the culprit.
void Engine::check_silence() {
  if (launched_.empty()) return;
  const int64_t since = std::max(last_result_ns_, launched_.front().time_ns);
  if (clock_.now_ns() - since >= options_.step_timeout_ns) fail_late_step();
}

void Engine::fail_late_step() {
  fail({ranks_.slowest(),
        cat("step ", launched_.front().step, " has not ended within ",
            static_cast<double>(options_.step_timeout_ns) / 1e9, " s; ", ranks_.progress(), "; ",
            scheduler_.num_running(), " requests run, ", scheduler_.num_waiting(), " wait")});
}

void Engine::wait_for_mail(int64_t wait_ns) {
  if (wait_ns <= 0) return;
  std::unique_lock lock(mutex_);
  mail_has_come_.wait_for(lock, std::chrono::nanoseconds(wait_ns), [&] { return !mail_.empty(); });
}

void Engine::publish_stats() {
  const BlockPool& pool = scheduler_.blocks().pool();
  const std::lock_guard lock(mutex_);
  stats_ = counters_;
  stats_.submitted = submitted_;
  stats_.refused = refused_;
  mailed_choices_ -= std::exchange(taken_choices_, 0);
  wait_per_request_ns_ = finish_interval_ns_;
  stats_.state = state_;
  stats_.failure = failure_;
  stats_.weights_version = scheduler_.facts().weights_version;
  stats_.queued = scheduler_.num_in_state(RequestState::kQueued);
  stats_.preempted = scheduler_.num_in_state(RequestState::kPreempted);
  stats_.running = scheduler_.num_running();
  stats_.max_running = scheduler_.facts().slots;
  stats_.blocks_free = pool.num_free();
  stats_.blocks_held = pool.num_held();
  stats_.blocks_cached = pool.num_idle();
  stats_.block_size = scheduler_.facts().block_size;
  stats_.preemptions = scheduler_.num_preemptions();
  stats_.drafts = scheduler_.num_drafts();
  stats_.accepted_drafts = scheduler_.num_accepted_drafts();
  stats_.swapped_blocks = scheduler_.num_swapped_blocks();
}

// -- outputs

void Engine::add_output(const StepOutput& given, int64_t version, int64_t now_ns) {
  Sequence& sequence = *given.sequence;
  const std::pair key(sequence.request, sequence.choice);
  Output& output = outputs_.at(key);
  Event event;
  event.request = sequence.request;
  event.choice = sequence.choice;
  event.time_ns = now_ns;
  add_prompt(given, output, event);
  std::optional<Finish> ends;
  const auto& draws = given.draws;
  int64_t later = std::ranges::count_if(draws, &DrawnToken::finite);
  for (const DrawnToken& draw : draws) {
    if (draw.finite) {
      ends = add_token(sequence, output, draw, --later, version, event);
    } else {
      ends = Finish{.reason = FinishReason::kNonFinite,
                    .message = cat("the model's logits are not finite at position ",
                                   sequence.known(), "; the weights may be damaged")};
    }
    if (ends) break;
  }
  if (ends && later > 0) scheduler_.take_back(sequence, later);
  if (draws.empty() && given.prompt_is_done && sequence.spec().stop.max_tokens == 0)
    ends = Finish{.reason = FinishReason::kLength};
  if (ends) {
    const RequestEvent cause = is_error(ends->reason) ? RequestEvent::kError : RequestEvent::kToken;
    end_event(sequence, output, event, std::move(*ends), cause);
  } else if (!event.tokens.empty() || !event.prompt_log_probabilities.empty()) {
    events_.push_back(std::move(event));
  }
}

void Engine::add_prompt(const StepOutput& given, Output& output, Event& event) {
  output.prompt.insert(output.prompt.end(), given.scores.begin(), given.scores.end());
  if (output.prompt_wanted == 0 ||
      static_cast<int64_t>(output.prompt.size()) < output.prompt_wanted)
    return;
  event.prompt_log_probabilities = std::exchange(output.prompt, {});
  output.prompt_wanted = 0;
}

std::optional<Finish> Engine::add_token(Sequence& sequence, Output& output, const DrawnToken& draw,
                                        int64_t later, int64_t version, Event& event) {
  event.tokens.push_back({draw.id, version, draw.log_probabilities});
  ++counters_.output_tokens;
  const int64_t now = event.time_ns;
  if (output.first_token_ns < 0) {
    output.first_token_ns = now;
    counters_.first_token.add(now - sequence.submitted_ns);
  } else {
    counters_.gap.add(now - output.last_token_ns);
  }
  output.last_token_ns = now;
  const StopConditions& stop = sequence.spec().stop;
  if (contains(stop.end_tokens, draw.id))
    return Finish{.reason = FinishReason::kEndToken, .stop_token = draw.id};
  if (contains(stop.stop_tokens, draw.id))
    return Finish{.reason = FinishReason::kStopToken, .stop_token = draw.id};
  if (output.text) {
    event.text += output.text->push(draw.id);
    if (const int32_t match = output.text->match(); match >= 0)
      return Finish{.reason = FinishReason::kStopText,
                    .stop_text = stop.stop_texts[static_cast<size_t>(match)]};
  }
  // Drafts go neither beyond the end of a grammar nor beyond the longest text.
  if (later > 0) return std::nullopt;
  if (sequence.grammar && sequence.grammar->has_ended())
    return Finish{.reason = FinishReason::kEndToken, .stop_token = draw.id};
  if (sequence.grammar && !sequence.grammar->failure().empty())
    return Finish{.reason = FinishReason::kGrammar, .message = sequence.grammar->failure()};
  if (sequence.outputs() >= stop.max_tokens) return Finish{.reason = FinishReason::kLength};
  return std::nullopt;
}

void Engine::finish(Sequence& sequence, RequestEvent cause, FinishReason reason,
                    const std::string& message) {
  Event event;
  event.request = sequence.request;
  event.choice = sequence.choice;
  event.time_ns = clock_.now_ns();
  Output& output = outputs_.at({sequence.request, sequence.choice});
  end_event(sequence, output, event, {.reason = reason, .message = message}, cause);
}

void Engine::end_event(Sequence& sequence, Output& output, Event& event, Finish finish,
                       RequestEvent cause) {
  if (output.text && output.text->match() < 0) {
    event.text += output.text->finish();
    const int32_t match = output.text->match();
    if (match >= 0 && is_complete(finish.reason)) {
      finish.reason = FinishReason::kStopText;
      finish.stop_text = sequence.spec().stop.stop_texts[static_cast<size_t>(match)];
    }
  }
  const int64_t submitted = sequence.submitted_ns;
  finish.usage = {.prompt_tokens = sequence.prompt,
                  .cached_tokens = std::max<int64_t>(0, sequence.cached_tokens),
                  .output_tokens = sequence.outputs(),
                  .preemptions = sequence.preemptions,
                  .drafts = sequence.drafted,
                  .accepted_drafts = sequence.accepted};
  if (sequence.scheduled_ns >= 0) finish.queued_ns = sequence.scheduled_ns - submitted;
  if (output.first_token_ns >= 0) finish.first_token_ns = output.first_token_ns - submitted;
  finish.total_ns = event.time_ns - submitted;
  if (last_finish_ns_ > 0) {
    const auto interval = static_cast<double>(event.time_ns - last_finish_ns_);
    finish_interval_ns_ += (interval - finish_interval_ns_) * (finish_interval_ns_ > 0 ? 0.05 : 1);
  }
  last_finish_ns_ = event.time_ns;
  ++counters_.finished[static_cast<size_t>(finish.reason)];
  counters_.prompt_tokens += static_cast<uint64_t>(finish.usage.prompt_tokens);
  counters_.cached_tokens += static_cast<uint64_t>(finish.usage.cached_tokens);
  counters_.whole.add(finish.total_ns);
  if (finish.queued_ns >= 0) counters_.queue.add(finish.queued_ns);
  event.finish = std::move(finish);
  events_.push_back(std::move(event));
  outputs_.erase({sequence.request, sequence.choice});
  scheduler_.finish(sequence, cause);
}

void Engine::finish_all(RequestEvent cause, FinishReason reason, const std::string& message,
                        bool queued_only) {
  for (const auto& sequence : scheduler_.sequences())
    if (!queued_only || sequence->state == RequestState::kQueued)
      finish(*sequence, cause, reason, message);
}

}  // namespace megatron
