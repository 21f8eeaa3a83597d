#include "fake_engine.h"

#include <algorithm>
#include <chrono>

#include "megatron/base/check.h"

namespace megatron {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

struct FakeEngine::Text {
  RequestId id{};
  int32_t choice = 0;
  std::shared_ptr<const RequestSpec> spec;
  std::vector<int32_t> reply;
  size_t next = 0;
  std::optional<TextOutput> output;
  int64_t submitted_ns = 0, first_token_ns = -1, last_token_ns = -1, queued_ns = -1;
  bool begun = false, cancelled = false, ended = false;
  int64_t version = 0;
};

PositionLogProbabilities fake_log_probabilities(int32_t id, int32_t top, int64_t vocab_size) {
  PositionLogProbabilities numbers;
  numbers.chosen = {id, -0.5f - static_cast<float>(id) / 1000.0f};
  for (int32_t i = 0; i < top; ++i)
    numbers.top.push_back({static_cast<int32_t>((id + i) % vocab_size),
                           numbers.chosen.log_probability - static_cast<float>(i)});
  return numbers;
}

FakeEngine::FakeEngine(const Tokenizer& tokenizer, RequestLimits limits, FakeEngineOptions options)
    : tokenizer_(tokenizer), limits_(limits), options_(options) {
  stats_.state = EngineState::kRunning;
  stats_.max_running = options.max_running;
  stats_.block_size = 64;
  stats_.blocks_free = 1000;
  thread_ = std::thread([this] { run(); });
}

FakeEngine::~FakeEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FakeEngine::set_script(Script script) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(script);
}

void FakeEngine::set_state(EngineState state) {
  const std::lock_guard lock(mutex_);
  stats_.state = state;
  stats_.failure = state == EngineState::kFailed ? "rank 1 does not answer" : "";
  changed_.notify_all();
}

std::vector<int32_t> FakeEngine::reply(const RequestSpec& spec, int32_t choice) const {
  if (script_) return script_(spec, choice);
  // The prompt again and again; ends after 20 tokens and a few more of later choices.
  std::vector<int32_t> ids;
  const size_t length = options_.stop_early ? 20 + static_cast<size_t>(choice) : size_t{1} << 20;
  for (size_t i = 0; i < std::min(length, static_cast<size_t>(spec.stop.max_tokens)); ++i)
    ids.push_back(spec.prompt[i % spec.prompt.size()]);
  return ids;
}

Admission FakeEngine::submit(RequestSpec spec) {
  if (auto refusal = check_request(spec, limits_)) return {std::nullopt, std::move(refusal)};
  const std::lock_guard lock(mutex_);
  if (stats_.state != EngineState::kRunning && stats_.state != EngineState::kPaused)
    return {std::nullopt, Refusal{Refusal::Kind::kUnavailable, "",
                                  cat("the engine is ", name(stats_.state)), 1'500'000'000}};
  if (static_cast<int32_t>(queued_.size()) + spec.choices > options_.max_queued) {
    ++stats_.refused;
    return {std::nullopt,
            Refusal{Refusal::Kind::kQueueFull, "", "the queue is full", 2'100'000'000}};
  }
  last_spec_ = spec;
  const auto shared = std::make_shared<const RequestSpec>(std::move(spec));
  const RequestId id{next_id_++};
  for (int32_t choice = 0; choice < shared->choices; ++choice) {
    auto text = std::make_shared<Text>();
    text->id = id;
    text->choice = choice;
    text->spec = shared;
    text->reply = reply(*shared, choice);
    text->submitted_ns = now_ns();
    std::shared_ptr<const StopAutomaton> stops;
    if (!shared->stop.stop_texts.empty())
      stops = std::make_shared<StopAutomaton>(shared->stop.stop_texts);
    text->output.emplace(tokenizer_, shared->stop, stops);
    queued_.push_back(std::move(text));
    ++stats_.submitted;
  }
  changed_.notify_all();
  return {id, std::nullopt};
}

void FakeEngine::cancel(RequestId request) {
  const std::lock_guard lock(mutex_);
  for (const auto& text : queued_)
    if (text->id == request) text->cancelled = true;
  for (const auto& text : running_)
    if (text->id == request) text->cancelled = true;
  changed_.notify_all();
}

Ticket FakeEngine::command(EngineCommand command, int64_t) {
  const Ticket ticket;
  CommandOutcome outcome;
  {
    const std::lock_guard lock(mutex_);
    const EngineTransition& move = transition(stats_.state, input_of(command));
    if (move.answer == EngineAnswer::kRefused) {
      outcome.kind = CommandOutcome::Kind::kRefused;
      outcome.message = refusal_reason(stats_.state, input_of(command));
    } else if (move.answer == EngineAnswer::kMoves) {
      stats_.state = move.next;
    }
    if (const auto* update = std::get_if<UpdateWeightsCommand>(&command);
        update != nullptr && outcome.kind == CommandOutcome::Kind::kDone)
      stats_.weights_version = update->version;
    outcome.state = stats_.state;
  }
  changed_.notify_all();
  ticket.resolve(outcome);
  return ticket;
}

EngineStats FakeEngine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.queued = static_cast<int64_t>(queued_.size());
  stats.running = static_cast<int64_t>(running_.size());
  return stats;
}

RequestSpec FakeEngine::last_spec() const {
  const std::lock_guard lock(mutex_);
  return last_spec_;
}

void FakeEngine::finish(Text& text, Event& event, FinishReason reason) {
  Finish finish;
  finish.reason = reason;
  if (reason == FinishReason::kStopText)
    finish.stop_text = text.spec->stop.stop_texts[static_cast<size_t>(text.output->match())];
  else
    event.text += text.output->finish();
  if (reason == FinishReason::kEndToken || reason == FinishReason::kStopToken)
    finish.stop_token = event.tokens.back().id;
  if (is_error(reason)) finish.message = "planned";
  const int64_t now = now_ns();
  finish.usage = {static_cast<int64_t>(text.spec->prompt.size()), text.choice == 0 ? 1 : 0,
                  static_cast<int64_t>(text.next), 0};
  finish.queued_ns = text.queued_ns - text.submitted_ns;
  finish.first_token_ns = text.first_token_ns - text.submitted_ns;
  finish.total_ns = now - text.submitted_ns;
  event.finish = finish;
  ++stats_.finished[static_cast<size_t>(reason)];
  stats_.whole.add(finish.total_ns);
}

void FakeEngine::take_token(Text& text, Event& event) {
  const StopConditions& stop = text.spec->stop;
  const auto is_in = [](const std::vector<int32_t>& ids, int32_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  const bool ends = text.next >= text.reply.size() && !stop.end_tokens.empty();
  const int32_t id = ends ? stop.end_tokens[0] : text.reply[text.next % text.reply.size()];
  ++text.next;
  ++stats_.output_tokens;
  GeneratedToken token{id, text.version, std::nullopt};
  if (text.spec->log_probabilities.output_top >= 0)
    token.log_probabilities =
        fake_log_probabilities(id, text.spec->log_probabilities.output_top, limits_.vocab_size);
  event.tokens.push_back(std::move(token));
  const int64_t now = now_ns();
  if (text.first_token_ns < 0) {
    text.first_token_ns = now;
    stats_.first_token.add(now - text.submitted_ns);
  } else {
    stats_.gap.add(now - text.last_token_ns);
  }
  text.last_token_ns = now;
  if (is_in(stop.end_tokens, id)) return finish(text, event, FinishReason::kEndToken);
  if (is_in(stop.stop_tokens, id)) return finish(text, event, FinishReason::kStopToken);
  event.text += options_.stamp ? std::to_string(now) + "          " : text.output->push(id);
  if (text.output->match() >= 0) return finish(text, event, FinishReason::kStopText);
  if (static_cast<int64_t>(text.next) >= stop.max_tokens)
    finish(text, event, FinishReason::kLength);
}

std::vector<Event> FakeEngine::step() {
  while (static_cast<int32_t>(running_.size()) < options_.max_running && !queued_.empty()) {
    running_.push_back(queued_.front());
    queued_.pop_front();
    running_.back()->queued_ns = now_ns();
    stats_.queue.add(running_.back()->queued_ns - running_.back()->submitted_ns);
  }
  std::vector<Event> events;
  const int64_t now = now_ns();
  const uint64_t phases = static_cast<uint64_t>(options_.phases);
  for (const auto& text : running_) {
    if (static_cast<uint64_t>(text->id) % phases != stats_.steps % phases && !text->cancelled)
      continue;
    Event event{text->id, text->choice, now};
    const RequestSpec& spec = *text->spec;
    text->version = stats_.weights_version;
    if (!std::exchange(text->begun, true)) {
      stats_.prompt_tokens += spec.prompt.size();
      if (text->choice == 0 && spec.log_probabilities.prompt_top >= 0)
        for (size_t i = 1; i < spec.prompt.size(); ++i)
          event.prompt_log_probabilities.push_back(fake_log_probabilities(
              spec.prompt[i], spec.log_probabilities.prompt_top, limits_.vocab_size));
    }
    const FinishReason planned = fail_with_;
    if (text->cancelled)
      finish(*text, event, FinishReason::kCancelled);
    else if (spec.timeout_ns > 0 && now - text->submitted_ns > spec.timeout_ns)
      finish(*text, event, FinishReason::kDeadline);
    else if (planned != FinishReason::kLength && text->next > 0)
      finish(*text, event, planned);
    else if (spec.stop.max_tokens == 0)
      finish(*text, event, FinishReason::kLength);
    else
      take_token(*text, event);
    text->ended = event.finish.has_value();
    events.push_back(std::move(event));
  }
  std::erase_if(running_, [](const auto& text) { return text->ended; });
  ++stats_.steps;
  stats_.step_tokens += events.size();
  return events;
}

void FakeEngine::run() {
  int64_t next = now_ns();
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if ((running_.empty() && queued_.empty()) || stats_.state == EngineState::kPaused ||
        stats_.state == EngineState::kSuspended || stats_.state == EngineState::kFailed) {
      changed_.wait(lock);
      next = now_ns();
      continue;
    }
    std::vector<Event> events = step();
    lock.unlock();
    if (listener_) listener_(std::move(events));
    next = std::max(next + options_.step_ns, now_ns() - options_.step_ns);
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::max<int64_t>(0, next - now_ns())));
    lock.lock();
  }
}

}  // namespace megatron
