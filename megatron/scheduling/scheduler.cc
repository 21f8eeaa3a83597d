#include "megatron/scheduling/scheduler.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "megatron/base/check.h"

namespace megatron {

std::string_view name(Resource resource) {
  static constexpr std::array<std::string_view, 7> kNames = {"nothing",
                                                             "a slot",
                                                             "blocks",
                                                             "the budget of steps",
                                                             "the prompt of its first choice",
                                                             "a token in flight",
                                                             "the end of a pause"};
  return kNames.at(static_cast<size_t>(resource));
}

Scheduler::Scheduler(const SchedulerConfig& config, const RunnerFacts& facts,
                     PrefixIndex::Hash hash)
    : config_(config),
      facts_(facts),
      blocks_({.blocks = facts.device_blocks,
               .block_size = facts.block_size,
               .max_idle_share = config.max_idle_share,
               .hash = hash,
               .record_freed = config.poison_freed_blocks}),
      host_blocks_(facts.host_blocks),
      budget_(std::max<int64_t>(config.max_step_tokens, facts.slots), config.max_gap_ns),
      shares_(config.share_prefixes && !facts.owns_state) {
  MEGATRON_CHECK(facts.slots > 0 && facts.block_size > 0 && facts.device_blocks > 0, "a cache of ",
                 facts.device_blocks, " blocks of ", facts.block_size, " positions for ",
                 facts.slots, " sequences");
  MEGATRON_CHECK(
      !config.draft_source || !facts.owns_state || config.max_drafts <= facts.state_drafts,
      "speculative decoding takes back what was computed of tokens that were not drawn, and the "
      "states of fixed size of this model are kept for ",
      facts.state_drafts, " of them at a time, not for ", config.max_drafts);
  for (int32_t slot = facts.slots; slot-- > 0;) free_slots_.push_back(slot);
  for (int32_t state = facts.host_states; state-- > 0;) free_host_states_.push_back(state);
}

void Scheduler::move(Sequence& sequence, RequestEvent event, RequestState next) {
  MEGATRON_ASSERT(transition(sequence.state, event).leads_to(next), "\"", megatron::name(event),
                  "\" leads a sequence from ", megatron::name(sequence.state), " to ",
                  megatron::name(next));
  sequence.state = next;
}

std::optional<Refusal> Scheduler::submit(RequestId id, RequestSpec spec, int64_t now_ns) {
  const int64_t waiting = num_in_state(RequestState::kQueued);
  if (waiting + spec.choices > config_.max_waiting)
    return Refusal{Refusal::Kind::kQueueFull, "",
                   cat(waiting, " requests are waiting, of ", config_.max_waiting, " at most"), 0};
  auto group = std::make_shared<SequenceGroup>();
  group->spec = std::move(spec);
  const RequestSpec& given = group->spec;
  // Given rows are no tokens that a prefix could be found by.
  group->prompt_is_shared = !shares_ || given.rows != nullptr;
  for (int32_t choice = 0; choice < given.choices; ++choice) {
    auto sequence = std::make_shared<Sequence>();
    sequence->request = id;
    sequence->choice = choice;
    sequence->group = group;
    sequence->arrival = ++arrivals_;
    sequence->submitted_ns = now_ns;
    if (given.timeout_ns > 0 && given.timeout_ns < INT64_MAX - now_ns)
      sequence->deadline_ns = now_ns + given.timeout_ns;
    sequence->given = given.rows ? given.rows->count : 0;
    sequence->prompt = prompt_positions(given);
    sequence->ids = given.prompt;
    sequence->most_drafts = config_.max_drafts;
    if (given.grammar)
      sequence->grammar.emplace(*given.grammar, facts_.vocab_size, given.sampling.forbidden,
                                ends_of(given.stop), given.stop.min_tokens);
    const bool scores = given.log_probabilities.prompt_top >= 0 && choice == 0;
    sequence->scored =
        scores ? std::max<int64_t>(1, sequence->given + given.log_probabilities.prompt_from)
               : sequence->prompt;
    sequences_.emplace(std::pair(id, choice), sequence);
    waiting_.push_back(std::move(sequence));
  }
  return std::nullopt;
}

Scheduler::List Scheduler::sequences() const {
  List list;
  for (const auto& [key, sequence] : sequences_) list.push_back(sequence);
  return list;
}

Scheduler::List Scheduler::sequences(RequestId id) const {
  List list;
  for (auto it = sequences_.lower_bound({id, 0}); it != sequences_.end() && it->first.first == id;
       ++it)
    list.push_back(it->second);
  return list;
}

std::shared_ptr<Sequence> Scheduler::sequence(RequestId id, int32_t choice) const {
  const auto found = sequences_.find({id, choice});
  MEGATRON_ASSERT(found != sequences_.end(), "a sequence has ended");
  return found->second;
}

bool Scheduler::has_started() const {
  return !running_.empty() || std::ranges::any_of(waiting_, [](const auto& sequence) {
    return sequence->state == RequestState::kPreempted;
  });
}

Scheduler::List Scheduler::expired(int64_t now_ns) const {
  List list;
  for (const auto& [key, sequence] : sequences_)
    if (sequence->deadline_ns <= now_ns) list.push_back(sequence);
  return list;
}

int64_t Scheduler::num_in_state(RequestState state) const {
  return std::count_if(sequences_.begin(), sequences_.end(),
                       [&](const auto& entry) { return entry.second->state == state; });
}

void Scheduler::finish(Sequence& sequence, RequestEvent event) {
  const bool running = sequence.is_running();
  move(sequence, event, RequestState::kFinished);
  const auto is_it = [&](const auto& other) { return other.get() == &sequence; };
  const auto found = sequences_.find({sequence.request, sequence.choice});
  const std::shared_ptr<Sequence> keep = found->second;
  if (config_.draft_source) config_.draft_source->forget(sequence);
  sequences_.erase(found);
  if (running) {
    std::erase_if(running_, is_it);
    publish(sequence, /*tail=*/true);
    leave_device(sequence, sequence.last_step);
  } else {
    std::erase_if(waiting_, is_it);
    drop_host_copy(sequence);
  }
  if (sequence.choice == 0) sequence.group->prompt_is_shared = true;
}

void Scheduler::leave_device(Sequence& sequence, int64_t after) {
  for (const int32_t block : sequence.blocks)
    if (block != kNoBlock) blocks_.release(block, after);
  sequence.blocks.clear();
  sequence.dropped = sequence.announced = sequence.announced_dropped = 0;
  sequence.published = 0;
  sequence.node = {};
  sequence.publishes = false;
  released_slots_.push_back(sequence.slot);
  free_slots_.push_back(sequence.slot);
  sequence.slot = -1;
}

std::vector<StepOutput> Scheduler::read(const StepResult& result, int64_t duration_ns) {
  MEGATRON_ASSERT(!in_flight_.empty() && in_flight_.front().step == result.step,
                  "the result of step ", result.step, " comes out of order");
  const InFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  if (duration_ns > 0 && step.rows > 0) budget_.observe(step.rows, step.context, duration_ns);
  std::vector<StepOutput> outputs;
  size_t draw = 0, score = 0;
  for (const InFlight::Entry& entry : step.entries) {
    StepOutput output = read_entry(entry, result, draw, score);
    if (output.sequence &&
        (!output.draws.empty() || !output.scores.empty() || output.prompt_is_done))
      outputs.push_back(std::move(output));
  }
  MEGATRON_CHECK(draw == result.draws.size() && score == result.scores.size(), "step ", step.step,
                 " gave ", result.draws.size(), " tokens and ", result.scores.size(),
                 " log-probabilities, expected ", draw, " and ", score);
  ended_step_ = result.step;
  blocks_.step_ended(ended_step_);
  free_ended_host_copies();
  return outputs;
}

// What was swapped out is not needed, or has become wrong; it is computed anew.
void Scheduler::drop_host_copy(Sequence& sequence) {
  if (!sequence.swapped) return;
  for (const int32_t block : sequence.host_blocks)
    pending_host_blocks_.emplace_back(sequence.last_step, block);
  if (sequence.host_state >= 0)
    pending_host_states_.emplace_back(sequence.last_step, sequence.host_state);
  sequence.host_blocks.clear();
  sequence.host_state = -1;
  sequence.host_dropped = 0;
  sequence.swapped = false;
  forget_computed(sequence);
}

// Everything is computed again.
void Scheduler::forget_computed(Sequence& sequence) {
  sequence.computed = sequence.ended = 0;
  sequence.stood = 0;
}

void Scheduler::free_ended_host_copies() {
  const auto free_ended = [&](auto& pending, auto&& free) {
    std::erase_if(pending, [&](const auto& waiting) {
      if (waiting.first > ended_step_) return false;
      free(waiting.second);
      return true;
    });
  };
  free_ended(pending_host_blocks_, [&](int32_t block) {
    host_blocks_.release(block);
    host_blocks_.free(block);
  });
  free_ended(pending_host_states_, [&](int32_t state) { free_host_states_.push_back(state); });
}

StepOutput Scheduler::read_entry(const InFlight::Entry& entry, const StepResult& result,
                                 size_t& draw, size_t& score) {
  StepOutput output;
  Sequence& sequence = *entry.sequence;
  const bool live = sequence.state != RequestState::kFinished;
  for (int32_t i = 0; i < entry.scores; ++i, ++score)
    if (live && score < result.scores.size()) output.scores.push_back(result.scores[score]);
  if (draw + entry.num_draws() <= result.draws.size() && live)
    output.draws = take_draws(entry, std::span(result.draws).subspan(draw, entry.num_draws()));
  draw += entry.num_draws();
  if (!live) return output;
  output.sequence = entry.sequence;
  output.prompt_is_done = entry.prompt_ends;
  const auto accepted = std::max<int64_t>(1, static_cast<int64_t>(output.draws.size())) - 1;
  const bool resident = sequence.residency == entry.residency;
  // The keys of drafts that stand are in its blocks, or went to the host with them.
  if (resident && (sequence.is_running() || sequence.swapped)) {
    sequence.computed += accepted;
    sequence.stood += static_cast<int32_t>(accepted);
  }
  if (sequence.is_running() && resident) {
    sequence.ended = entry.end + accepted;
    publish(sequence, /*tail=*/false);
    if (sequence.ended >= sequence.prompt) sequence.group->prompt_is_shared = true;
  }
  return output;
}

// Those of them that stand.
std::vector<DrawnToken> Scheduler::take_draws(const InFlight::Entry& entry,
                                              std::span<const DrawnToken> given) {
  Sequence& sequence = *entry.sequence;
  std::vector<DrawnToken> draws;
  for (size_t i = 0; i < given.size(); ++i) {
    draws.push_back(given[i]);
    if (!given[i].finite) break;
    sequence.ids.push_back(given[i].id);
    if (sequence.grammar) sequence.grammar->advance(given[i].id);
    if (i < entry.drafts.size() && given[i].id != entry.drafts[i]) break;
  }
  if (entry.drafts.empty()) return draws;
  sequence.unread_drafts = false;
  const auto drafted = static_cast<int64_t>(entry.drafts.size());
  const auto accepted = static_cast<int64_t>(draws.size()) - 1;
  sequence.draws += accepted;
  sequence.drafted += drafted;
  sequence.accepted += accepted;
  drafts_ += static_cast<uint64_t>(drafted);
  accepted_drafts_ += static_cast<uint64_t>(accepted);
  // As many as lately stood, and more while all do.
  sequence.most_drafts = static_cast<int32_t>(
      std::clamp<int64_t>(accepted == drafted ? 2 * drafted : accepted, 1, config_.max_drafts));
  return draws;
}

void Scheduler::take_back(Sequence& sequence, int64_t count) {
  sequence.ids.resize(sequence.ids.size() - static_cast<size_t>(count));
  sequence.draws -= count;
  sequence.accepted -= count - 1;  // the last one was drawn behind all drafts
  accepted_drafts_ -= static_cast<uint64_t>(count - 1);
}

// Gives the index the blocks whose positions have ended; `tail`: the last, partial one too.
void Scheduler::publish(Sequence& sequence, bool tail) {
  if (!sequence.publishes) return;
  const std::span<const int32_t> ids = sequence.ids;
  const int64_t end = std::min(sequence.ended, sequence.known());
  while (sequence.published * facts_.block_size < end) {
    const int64_t first = sequence.published * facts_.block_size;
    const int64_t count = std::min(facts_.block_size, end - first);
    const int32_t block = sequence.blocks[static_cast<size_t>(sequence.published)];
    if ((count < facts_.block_size && !tail) || block == kNoBlock) return;
    const PrefixNode parent =
        sequence.published == 0 ? blocks_.root(identity(sequence)) : sequence.node;
    sequence.node = blocks_.add(
        parent, ids.subspan(static_cast<size_t>(first), static_cast<size_t>(count)), block);
    if (!sequence.node || count < facts_.block_size) {
      sequence.publishes = false;
      return;
    }
    ++sequence.published;
  }
}

void Scheduler::recompute_all() {
  MEGATRON_ASSERT(in_flight_.empty(), "steps are in flight");
  for (const auto& sequence : List(running_)) preempt(nullptr, *sequence, /*may_swap=*/false);
  for (const auto& sequence : waiting_) {
    drop_host_copy(*sequence);
  }
  free_ended_host_copies();
  blocks_.forget_prefixes();
}

void Scheduler::forget_prefixes() {
  blocks_.forget_prefixes();
  for (const auto& sequence : running_) sequence->publishes = false;
}

void Scheduler::check_invariants() const {
  const BlockPool& pool = blocks_.pool();
  std::vector<int32_t> holds(static_cast<size_t>(pool.size()), 0);
  for (const auto& sequence : running_)
    for (const int32_t block : sequence->blocks)
      if (block != kNoBlock) ++holds[static_cast<size_t>(block)];
  for (const auto& [step, block] : blocks_.pending()) ++holds[static_cast<size_t>(block)];
  int32_t free = 0, held = 0, cached = 0;
  for (int32_t block = 0; block < pool.size(); ++block) {
    MEGATRON_ASSERT(pool.holds(block) == holds[static_cast<size_t>(block)], "block ", block,
                    " is held ", pool.holds(block), " times, by ",
                    holds[static_cast<size_t>(block)], " lists");
    const bool in_index = blocks_.index().contains(block);
    free += pool.is_free(block) ? 1 : 0;
    held += pool.holds(block) > 0 ? 1 : 0;
    cached += !pool.is_free(block) && pool.holds(block) == 0 && in_index ? 1 : 0;
    MEGATRON_ASSERT(!pool.is_free(block) || !in_index, "free block ", block, " is in the index");
  }
  MEGATRON_ASSERT(free + held + cached == pool.size(), free, " free, ", held, " held and ", cached,
                  " cached blocks of ", pool.size());
  MEGATRON_ASSERT(cached == blocks_.index().num_idle(), "idle blocks of the index");
  blocks_.index().check();
  for (const auto& sequence : running_) {
    MEGATRON_ASSERT(sequence->is_running() && sequence->slot >= 0, "a running sequence");
    for (size_t i = static_cast<size_t>(sequence->computed / facts_.block_size);
         i < sequence->blocks.size(); ++i)
      MEGATRON_ASSERT(holds[static_cast<size_t>(sequence->blocks[i])] == 1 &&
                          !blocks_.index().contains(sequence->blocks[i]),
                      "block ", sequence->blocks[i], " is shared and will be written");
  }
  size_t host = 0;
  for (const auto& sequence : waiting_) {
    MEGATRON_ASSERT(sequence->is_waiting() && sequence->slot < 0 && sequence->blocks.empty(),
                    "a waiting sequence");
    host += sequence->host_blocks.size();
  }
  MEGATRON_ASSERT(
      static_cast<int32_t>(host + pending_host_blocks_.size()) == host_blocks_.num_held(),
      "host blocks");
  MEGATRON_ASSERT(running_.size() + waiting_.size() == sequences_.size(), "lists of sequences");
  MEGATRON_ASSERT(running_.size() + free_slots_.size() == static_cast<size_t>(facts_.slots),
                  "slots");
}

}  // namespace megatron
