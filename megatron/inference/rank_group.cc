#include "megatron/inference/rank_group.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "megatron/base/check.h"
#include "megatron/scheduling/byte_io.h"

namespace megatron {
namespace {

enum class ToRank : uint8_t { kPlan, kTransition, kAlive, kStop };
enum class FromRank : uint8_t { kHello, kEnded, kOutcome, kFailed };

constexpr int64_t kAliveEvery_ns = 1'000'000'000;
constexpr int64_t kPoll_ns = 200'000;  // between looks at the runner and at rank 0

// Members of a transition, read or written.
template <class Io>
void visit_members(Io& io, SuspendRunner& v) {
  io(v.levels.cache);
  io(v.levels.weights);
}
template <class Io>
void visit_members(Io&, ResumeRunner&) {}
template <class Io>
void visit_members(Io& io, StageWeights& v) {
  io(v.source);
}
template <class Io>
void visit_members(Io& io, CommitWeights& v) {
  io(v.version);
}
template <class Io>
void visit_members(Io&, DiscardWeights&) {}

std::string transition_message(int64_t number, const RankTransition& transition) {
  ByteWriter writer;
  writer(ToRank::kTransition);
  writer(number);
  writer(static_cast<int32_t>(transition ? transition->index() : std::variant_npos));
  if (transition) {
    RunnerTransition copy = *transition;
    std::visit([&](auto& v) { visit_members(writer, v); }, copy);
  }
  return std::move(writer.bytes);
}

template <size_t... I>
RunnerTransition alternative(size_t index, std::index_sequence<I...>) {
  RunnerTransition value;
  ((index == I ? (value.emplace<I>(), 0) : 0), ...);
  return value;
}

RankTransition read_transition(ByteReader& reader) {
  int32_t index = -1;
  reader(index);
  if (index < 0) return std::nullopt;
  constexpr size_t kCount = std::variant_size_v<RunnerTransition>;
  MEGATRON_CHECK(index < static_cast<int32_t>(kCount), "a transition of kind ", index);
  RunnerTransition value =
      alternative(static_cast<size_t>(index), std::make_index_sequence<kCount>());
  std::visit([&](auto& v) { visit_members(reader, v); }, value);
  return value;
}

// What must be equal on all ranks, as text: "member=value" each.
std::string describe(const RunnerFacts& facts) {
  return cat("vocab_size=", facts.vocab_size, " hidden_size=", facts.hidden_size,
             " max_positions=", facts.max_positions, " window=", facts.window,
             " rope_border=", facts.rope_border, " takes_state_input=", facts.takes_state_input,
             " needs_state_input=", facts.needs_state_input, " owns_state=", facts.owns_state,
             " state_drafts=", facts.state_drafts, " adapters=", facts.num_adapters,
             " slots=", facts.slots, " block_size=", facts.block_size,
             " device_blocks=", facts.device_blocks, " host_blocks=", facts.host_blocks,
             " host_states=", facts.host_states, " draw_latency=", facts.draw_latency,
             " weights_version=", facts.weights_version);
}

std::string hello_of(const RunnerFacts& facts, const std::string& build) {
  return cat("build=", build, " plan_version=", kStepPlanVersion, " ", describe(facts));
}

// The members in which two lists of the same ones differ: "slots=4, expected slots=8".
std::string difference(std::string_view given, std::string_view expected) {
  std::string text;
  while (!given.empty() || !expected.empty()) {
    const auto word = [](std::string_view& rest) {
      const size_t end = std::min(rest.find(' '), rest.size());
      const std::string_view first = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      return first;
    };
    const std::string_view a = word(given), b = word(expected);
    if (a != b) text += cat(text.empty() ? "" : "; ", a, ", expected ", b);
  }
  return text;
}

}  // namespace

RankGroup::RankGroup(StepRunner& runner, FollowerLinks* links, const Clock& clock)
    : runner_(runner),
      links_(links),
      clock_(clock),
      ranks_(links != nullptr ? static_cast<size_t>(links->num_ranks()) : 1),
      outcomes_(ranks_.size()) {
  ranks_[0].ready = true;
}

std::optional<RankFailure> RankGroup::meet(int64_t deadline_ns, const std::string& build) {
  expected_hello_ = hello_of(runner_.facts(), build);
  for (;;) {
    const auto missing = std::ranges::find(ranks_, false, &Rank::ready);
    if (missing == ranks_.end()) return std::nullopt;
    const int64_t left = deadline_ns - clock_.now_ns();
    if (left <= 0)
      return RankFailure{static_cast<int>(missing - ranks_.begin()),
                         "it was not ready at the deadline"};
    if (const auto message = links_->receive(left))
      if (auto failure = handle(*message)) return failure;
  }
}

void RankGroup::send_to_all(std::string_view bytes) {
  for (int rank = 1; rank < size(); ++rank) links_->send(rank, bytes);
  last_sent_ns_ = clock_.now_ns();
}

void RankGroup::launch(const StepPlan& plan) {
  if (links_ != nullptr) {
    ByteWriter writer;
    writer(ToRank::kPlan);
    send_to_all(writer.bytes + serialise(plan));
  }
  runner_.launch(plan);
}

std::optional<StepResult> RankGroup::take(int64_t wait_ns) {
  std::optional<StepResult> result = runner_.take(wait_ns);
  if (result) ranks_[0].ended = result->step;
  return result;
}

void RankGroup::begin(const RankTransition& transition, const std::vector<bool>& targets) {
  ++transition_;
  std::ranges::fill(outcomes_, std::nullopt);
  const std::string message = transition_message(transition_, transition);
  for (int rank = 0; rank < size(); ++rank) {
    if (!targets[static_cast<size_t>(rank)])
      outcomes_[static_cast<size_t>(rank)] = "";
    else if (rank > 0)
      links_->send(rank, message);
  }
  last_sent_ns_ = clock_.now_ns();
  if (targets[0]) local_.emplace_back(transition_, transition);
}

bool RankGroup::settled() const {
  return std::ranges::all_of(outcomes_, [](const auto& outcome) { return outcome.has_value(); });
}

void RankGroup::poll_local(int64_t wait_ns) {
  while (!local_.empty()) {
    const auto& [number, transition] = local_.front();
    std::optional<std::string> outcome = "";
    if (transition) {
      if (!std::exchange(local_began_, true)) runner_.begin(*transition);
      outcome = runner_.poll(wait_ns);
      if (!outcome) return;
    }
    if (number == transition_) outcomes_[0] = outcome;
    local_began_ = false;
    local_.pop_front();
  }
}

std::optional<RankFailure> RankGroup::poll(int64_t wait_ns) {
  poll_local(links_ == nullptr ? wait_ns : 0);
  if (links_ == nullptr) return std::nullopt;
  const int64_t end = clock_.now_ns() + wait_ns;
  bool waited = false;
  for (;;) {
    // Rank 0's own part may end while others are waited for.
    const int64_t wait = waited ? 0 : std::clamp<int64_t>(end - clock_.now_ns(), 0, kPoll_ns);
    const std::optional<RankMessage> message = links_->receive(wait);
    if (message) {
      if (auto failure = handle(*message)) return failure;
      waited = true;  // what has come already is taken, too
      continue;
    }
    poll_local(0);
    if (waited || settled() || clock_.now_ns() >= end) break;
  }
  if (clock_.now_ns() - last_sent_ns_ >= kAliveEvery_ns) {
    ByteWriter writer;
    writer(ToRank::kAlive);
    send_to_all(writer.bytes);
  }
  return std::nullopt;
}

std::optional<RankFailure> RankGroup::handle(const RankMessage& message) {
  if (message.lost) {
    if (stopped_) return std::nullopt;  // it left as it was told to
    return RankFailure{message.rank, "its process has ended"};
  }
  Rank& rank = ranks_.at(static_cast<size_t>(message.rank));
  ByteReader reader(message.bytes, "a message of a rank");
  FromRank kind{};
  reader(kind);
  std::string text;
  int64_t number = 0;
  switch (kind) {
    case FromRank::kHello:
      reader(text);
      if (text != expected_hello_)
        return RankFailure{
            message.rank, "it runs another program or model: " + difference(text, expected_hello_)};
      rank.ready = true;
      return std::nullopt;
    case FromRank::kEnded:
      reader(rank.ended);
      return std::nullopt;
    case FromRank::kOutcome:
      reader(number);
      reader(text);
      if (number == transition_) outcomes_[static_cast<size_t>(message.rank)] = std::move(text);
      return std::nullopt;
    case FromRank::kFailed:
      reader(text);
      return RankFailure{message.rank, std::move(text)};
  }
  return RankFailure{message.rank, "it sent a message of an unknown kind"};
}

std::string RankGroup::progress() const {
  std::string text;
  for (int rank = 0; rank < size(); ++rank)
    text += cat(rank > 0 ? ", " : "", "rank ", rank, " has ended step ",
                ranks_[static_cast<size_t>(rank)].ended);
  return text;
}

int RankGroup::slowest() const {
  const auto slowest = std::ranges::min_element(ranks_, {}, &Rank::ended);
  const bool alone = std::ranges::count(ranks_, slowest->ended, &Rank::ended) == 1;
  return alone ? static_cast<int>(slowest - ranks_.begin()) : -1;
}

void RankGroup::stop() {
  stopped_ = true;
  if (links_ == nullptr) return;
  ByteWriter writer;
  writer(ToRank::kStop);
  send_to_all(writer.bytes);
}

Follower::Follower(LeaderLink& link, StepRunner& runner, const std::string& build)
    : link_(link), runner_(runner) {
  ByteWriter hello;
  hello(FromRank::kHello);
  hello(hello_of(runner.facts(), build));
  link_.send(hello.bytes);
}

bool Follower::pump(int64_t wait_ns) {
  if (transition_) {
    advance_transition(wait_ns);
    return true;
  }
  // What is in flight is looked at again and again while messages are waited for.
  const int64_t wait = in_flight_ > 0 ? std::min(wait_ns, kPoll_ns) : wait_ns;
  const std::optional<std::string> message = link_.receive(wait);
  if (message) {
    ++heard_;
    execute(*message);
  }
  if (in_flight_ > 0) take(0);
  return !stopped_;
}

void Follower::execute(std::string_view bytes) {
  ByteReader reader(bytes, "a message of rank 0");
  ToRank kind{};
  reader(kind);
  switch (kind) {
    case ToRank::kPlan:
      return launch(bytes.substr(1));
    case ToRank::kTransition:
      reader(number_);
      transition_ = read_transition(reader);
      return;
    case ToRank::kAlive:
      return;
    case ToRank::kStop:
      stopped_ = true;
      return;
  }
  throw_error("a message of rank 0 has an unknown kind");
}

void Follower::launch(std::string_view bytes) {
  const StepPlan plan = parse_step_plan(bytes);
  MEGATRON_CHECK(plan.step == last_step_ + 1 && plan.previous_hash == last_hash_,
                 "the plan of step ", plan.step, " does not follow that of step ", last_step_,
                 ", which this rank has");
  last_step_ = plan.step;
  last_hash_ = hash(plan);
  runner_.launch(plan);
  ++in_flight_;
}

void Follower::take(int64_t wait_ns) {
  const std::optional<StepResult> result = runner_.take(wait_ns);
  if (!result) return;
  --in_flight_;
  ByteWriter writer;
  writer(FromRank::kEnded);
  writer(result->step);
  link_.send(writer.bytes);
}

void Follower::advance_transition(int64_t wait_ns) {
  if (in_flight_ > 0) return take(wait_ns);
  std::optional<std::string> outcome = "";
  if (const RankTransition& part = *transition_) {
    if (!std::exchange(began_, true)) runner_.begin(*part);
    outcome = runner_.poll(wait_ns);
    if (!outcome) return;
  }
  began_ = false;
  transition_.reset();
  ByteWriter writer;
  writer(FromRank::kOutcome);
  writer(number_);
  writer(*outcome);
  link_.send(writer.bytes);
}

void Follower::tell_failure(const std::string& message) {
  ByteWriter writer;
  writer(FromRank::kFailed);
  writer(message);
  try {
    link_.send(writer.bytes);
  } catch (const Error&) {  // rank 0 is lost; the first error says why
  }
}

void follow(LeaderLink& link, StepRunner& runner, const Clock& clock,
            const FollowOptions& options) {
  Follower follower(link, runner, options.build);
  int64_t heard = 0, heard_ns = clock.now_ns();
  try {
    while (follower.pump(kAliveEvery_ns)) {
      if (std::exchange(heard, follower.heard()) != follower.heard() || follower.in_transition())
        heard_ns = clock.now_ns();
      MEGATRON_CHECK(clock.now_ns() - heard_ns < options.silence_ns, "rank 0 has said nothing for ",
                     options.silence_ns / 1'000'000'000, " seconds");
    }
  } catch (const std::exception& error) {
    follower.tell_failure(error.what());
    throw;
  }
}

}  // namespace megatron
