// How a step is planned; see scheduler.h.
#include <algorithm>
#include <iterator>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/scheduling/scheduler.h"

namespace megatron {

struct Scheduler::Draft {
  int64_t now_ns = 0;
  StepPlan plan;
  std::vector<Part> parts;
  int64_t rows = 0, context = 0;
  // The place in the order of the first sequence that lacks a block: those after it take none, so
  // that it gets the next.
  std::optional<std::pair<int64_t, uint64_t>> starved;

  bool has(const Sequence& sequence) const { return sequence.last_part == plan.step; }
};

std::optional<StepPlan> Scheduler::plan(int64_t now_ns) {
  Draft draft;
  draft.now_ns = now_ns;
  draft.plan.step = last_step_ + 1;
  waits_for_ = Resource::kNothing;
  plan_decodes(draft);
  plan_drafts(draft);
  plan_chunks(draft);
  admit(draft);
  const StepPlan& plan = draft.plan;
  if (draft.parts.empty() && plan.swap_out.empty() && plan.swap_in.empty() &&
      plan.state_swap_out.empty() && plan.state_swap_in.empty()) {
    MEGATRON_ASSERT(plan.starts.empty(), "a sequence starts and computes nothing");
    return std::nullopt;
  }
  return finish_plan(draft);
}

std::pair<int64_t, uint64_t> Scheduler::order(const Sequence& sequence, int64_t now_ns) const {
  const int64_t waited = std::max<int64_t>(0, now_ns - sequence.submitted_ns);
  return {sequence.spec().priority - waited / config_.ageing_ns, sequence.arrival};
}

Scheduler::List Scheduler::in_order(List list, int64_t now_ns) const {
  std::ranges::sort(list, {}, [&](const auto& s) { return order(*s, now_ns); });
  return list;
}

// A token that was drawn and not read is available on the device some steps later.
bool Scheduler::can_draw(const Sequence& sequence) const {
  if (sequence.draws >= sequence.spec().stop.max_tokens) return false;
  // The host makes its mask, or finds out which drafts stand.
  if ((sequence.grammar || sequence.unread_drafts) && sequence.unread() > 0) return false;
  return sequence.unread() == 0 || sequence.last_draw + facts_.draw_latency <= last_step_ + 1;
}

bool Scheduler::crosses_rope_border(const Sequence& sequence) const {
  return facts_.rope_border > 0 && !sequence.long_rope && sequence.length() > facts_.rope_border;
}

int64_t Scheduler::blocks_for(int64_t positions) const {
  return (positions + facts_.block_size - 1) / facts_.block_size;
}

void Scheduler::plan_decodes(Draft& draft) {
  List ready;
  std::ranges::copy_if(running_, std::back_inserter(ready), [&](const auto& sequence) {
    return sequence->state == RequestState::kDecode && can_draw(*sequence);
  });
  // With a pipeline the sequences are divided over as many steps as it has stages.
  const auto latency = static_cast<size_t>(facts_.draw_latency);
  const size_t most = (running_.size() + latency - 1) / latency;
  for (const auto& sequence : in_order(std::move(ready), draft.now_ns)) {
    if (!sequence->is_running() || draft.parts.size() >= most) continue;
    if (crosses_rope_border(*sequence)) {
      preempt(&draft, *sequence, /*may_swap=*/false);
      continue;
    }
    drop_behind_window(*sequence);
    const auto held = static_cast<int64_t>(sequence->blocks.size()) * facts_.block_size;
    if (sequence->computed < held || take_blocks(draft, *sequence, 1) == 1)
      add_part(draft, sequence, 1);
  }
}

// Drafts of the sequences that decode in this step.
void Scheduler::plan_drafts(Draft& draft) {
  if (!config_.draft_source) return;
  std::vector<DraftQuery> queries;
  std::vector<Part*> parts;
  for (Part& part : draft.parts) {
    const int64_t most = wanted_drafts(*part.sequence);
    if (most < 1) continue;
    queries.push_back({part.sequence.get(), most});
    parts.push_back(&part);
  }
  if (queries.empty()) return;
  config_.draft_source->propose(queries);
  for (size_t i = 0; i < parts.size(); ++i)
    add_drafts(draft, *parts[i], std::move(queries[i].drafts));
}

int64_t Scheduler::wanted_drafts(const Sequence& sequence) const {
  if (sequence.unread() > 0) return 0;
  int64_t most =
      std::min<int64_t>(sequence.most_drafts, sequence.spec().stop.max_tokens - sequence.draws - 1);
  // Beyond the border everything is computed anew.
  if (facts_.rope_border > 0 && !sequence.long_rope)
    most = std::min(most, facts_.rope_border - sequence.length());
  return most;
}

void Scheduler::add_drafts(Draft& draft, Part& part, std::vector<int32_t> drafts) {
  Sequence& s = *part.sequence;
  const StopConditions& stop = s.spec().stop;
  // Nothing is drawn after an end.
  const auto ends = [&](int32_t id) {
    return std::ranges::count(stop.end_tokens, id) + std::ranges::count(stop.stop_tokens, id) > 0;
  };
  drafts.erase(std::ranges::find_if(drafts, ends), drafts.end());
  // Prompts get half of what is left.
  int64_t most = std::ssize(drafts);
  if (!waiting_.empty() || draft.parts.size() < running_.size())
    most = std::min(most, (budget_.max_tokens() - draft.rows) / 2);
  most = budget_.chunk(draft.rows, draft.context, s.computed, most, /*least=*/0);
  // Drafts take nobody's blocks.
  const auto room = [&] {
    return static_cast<int64_t>(s.blocks.size()) * facts_.block_size - s.computed;
  };
  while (room() < most && !draft.starved &&
         blocks_.num_available() > blocks_promised() + config_.reserve_blocks)
    s.blocks.push_back(blocks_.take());
  most = std::min(most, room());
  drafts.resize(static_cast<size_t>(std::max<int64_t>(0, most)));
  if (s.grammar) drafts.resize(s.grammar->look_ahead(drafts, part.masks));
  if (drafts.empty()) return;
  const auto count = static_cast<int32_t>(drafts.size());
  part.part.count += count;
  part.part.known += count;
  part.part.drafts = count;
  part.drafts = std::move(drafts);
  draft.rows += count;
  draft.context += chunk_context(s.computed, count);
}

void Scheduler::plan_chunks(Draft& draft) {
  List prompts;
  std::ranges::copy_if(running_, std::back_inserter(prompts), [](const auto& sequence) {
    return sequence->state == RequestState::kPrefill;
  });
  for (const auto& sequence : in_order(std::move(prompts), draft.now_ns)) {
    if (sequence->is_running() && !plan_chunk(draft, sequence)) break;
  }
}

int64_t Scheduler::undivided(const Sequence& sequence, int64_t rows, int64_t most) {
  if (!sequence.spec().rows) return rows;
  const GivenRows& given = *sequence.spec().rows;
  int64_t fits = rows;
  while (fits > 0 && !given.stand_alone(sequence.computed + fits)) --fits;
  if (fits > 0 || rows <= 0) return fits;
  while (!given.stand_alone(sequence.computed + rows)) ++rows;
  return rows <= most ? rows : 0;
}

// False: neither this one nor those after it get rows in this step.
bool Scheduler::plan_chunk(Draft& draft, const std::shared_ptr<Sequence>& sequence) {
  const int64_t left = sequence->known() - sequence->computed;
  int64_t rows = budget_.chunk(draft.rows, draft.context, sequence->computed, left);
  rows = undivided(*sequence, rows, budget_.max_tokens() - draft.rows);
  if (rows <= 0) return false;
  drop_behind_window(*sequence);
  const int64_t held = static_cast<int64_t>(sequence->blocks.size());
  const int64_t needed = blocks_for(sequence->computed + rows);
  if (needed > held) take_blocks(draft, *sequence, needed - held);
  const auto room = static_cast<int64_t>(sequence->blocks.size()) * facts_.block_size;
  rows = undivided(*sequence, std::min(rows, room - sequence->computed), 0);
  if (rows > 0) add_part(draft, sequence, rows);
  return rows > 0;
}

void Scheduler::drop_behind_window(Sequence& sequence) {
  if (facts_.window == 0) return;
  const int64_t first_seen = sequence.computed - facts_.window + 1;
  while ((sequence.dropped + 1) * facts_.block_size <= first_seen) {
    int32_t& block = sequence.blocks[static_cast<size_t>(sequence.dropped)];
    blocks_.release(block, sequence.last_step);
    block = kNoBlock;
    ++sequence.dropped;
  }
}

int64_t Scheduler::take_blocks(Draft& draft, Sequence& sequence, int64_t count) {
  const auto place = order(sequence, draft.now_ns);
  if (draft.starved && *draft.starved < place) return 0;
  while (blocks_.num_available() < count) {
    // Blocks that a step in flight still uses come by themselves.
    if (blocks_.num_available() + blocks_.num_pending() >= count) break;
    const std::shared_ptr<Sequence> victim = choose_victim(draft, sequence);
    if (!victim) break;
    preempt(&draft, *victim, /*may_swap=*/true);
  }
  const int64_t taken = std::min<int64_t>(count, blocks_.num_available());
  for (int64_t i = 0; i < taken; ++i) sequence.blocks.push_back(blocks_.take());
  if (taken < count) draft.starved = place;
  return taken;
}

// The last in the order that this step does not compute yet; those that were preempted often only
// if there are no others.
std::shared_ptr<Sequence> Scheduler::choose_victim(const Draft& draft,
                                                   const Sequence& needing) const {
  std::shared_ptr<Sequence> victim;
  const auto rank = [&](const Sequence& sequence) {
    return std::pair(sequence.preemptions < config_.max_preemptions, order(sequence, draft.now_ns));
  };
  for (const auto& candidate : running_) {
    if (candidate.get() == &needing || draft.has(*candidate)) continue;
    const bool spared = candidate->preemptions >= config_.max_preemptions;
    const bool behind = order(*candidate, draft.now_ns) > order(needing, draft.now_ns);
    if (!behind && (spared || needing.preemptions < config_.max_preemptions)) continue;
    if (!victim || rank(*victim) < rank(*candidate)) victim = candidate;
  }
  return victim;
}

void Scheduler::preempt(Draft* draft, Sequence& sequence, bool may_swap) {
  const auto found =
      std::ranges::find_if(running_, [&](const auto& other) { return other.get() == &sequence; });
  move(sequence, RequestEvent::kOutOfBlocks, RequestState::kPreempted);
  waiting_.push_back(*found);
  running_.erase(found);
  ++preemptions_;
  ++sequence.preemptions;
  if (may_swap && swap_out(*draft, sequence)) {
    sequence.last_step = draft->plan.step;
  } else {
    publish(sequence, /*tail=*/true);
    forget_computed(sequence);
  }
  leave_device(sequence, sequence.last_step);
}

// False: the host has no room, or computing again is faster.
bool Scheduler::swap_out(Draft& draft, Sequence& sequence) {
  const auto live = static_cast<int32_t>(sequence.blocks.size()) - sequence.dropped;
  const bool state = facts_.owns_state;
  if (live > host_blocks_.num_free() || (state && free_host_states_.empty())) return false;
  if (live * config_.swap_block_tokens >= static_cast<double>(sequence.computed)) return false;
  for (const int32_t block : sequence.blocks) {
    if (block == kNoBlock) continue;
    sequence.host_blocks.push_back(*host_blocks_.take());
    draft.plan.swap_out.push_back({block, sequence.host_blocks.back()});
  }
  if (state) {
    sequence.host_state = free_host_states_.back();
    free_host_states_.pop_back();
    draft.plan.state_swap_out.push_back({sequence.slot, sequence.host_state});
  }
  sequence.swapped = true;
  sequence.host_dropped = sequence.dropped;
  swapped_blocks_ += static_cast<uint64_t>(live);
  return true;
}

void Scheduler::admit(Draft& draft) {
  if (free_slots_.empty() && !waiting_.empty()) {
    waits_for_ = Resource::kSlot;
    return;
  }
  for (const auto& sequence : in_order(waiting_, draft.now_ns)) {
    const Resource lacks = draft.starved ? Resource::kBlocks : try_admit(draft, sequence);
    if (lacks == Resource::kNothing) continue;
    if (waits_for_ == Resource::kNothing) waits_for_ = lacks;
    // One that needs what others may take lets none pass.
    if (lacks == Resource::kSlot || lacks == Resource::kBlocks || lacks == Resource::kBudget)
      return;
  }
}

// Blocks that running prompts will still take.
int64_t Scheduler::blocks_promised() const {
  int64_t sum = 0;
  for (const auto& sequence : running_)
    sum += std::max<int64_t>(
        0, blocks_for(sequence->length()) - static_cast<int64_t>(sequence->blocks.size()));
  return sum;
}

Resource Scheduler::try_admit(Draft& draft, const std::shared_ptr<Sequence>& sequence) {
  Sequence& s = *sequence;
  const bool only_scores = s.spec().stop.max_tokens == 0;
  if (s.unread() > 0 || (only_scores && s.residency > 0 && s.scored >= s.prompt))
    return Resource::kToken;
  if (!starts_new_ && s.state == RequestState::kQueued) return Resource::kPause;
  if (s.choice > 0 && !s.group->prompt_is_shared) return Resource::kPrompt;
  if (free_slots_.empty()) return Resource::kSlot;
  if (budget_.chunk(draft.rows, draft.context, s.computed, 1) < 1) return Resource::kBudget;
  if (s.swapped && crosses_rope_border(s)) drop_host_copy(s);
  PrefixHit hit;
  int64_t needed = 0;
  if (s.swapped) {
    needed = static_cast<int64_t>(s.host_blocks.size());
  } else {
    hit = find_prefix(s);
    needed = blocks_for(s.known());
    for (const int32_t block : hit.blocks) needed -= blocks_.pool().holds(block) > 0 ? 1 : 0;
  }
  // A prompt needs all of its blocks; the reserve is for those that run.
  const int64_t spare = blocks_.num_available() - needed;
  const bool alone = running_.empty();
  if (spare < 0 || (!alone && spare < blocks_promised() + config_.reserve_blocks))
    return Resource::kBlocks;
  // The source of a copy must stay until the step has ended.
  if (spare < 1) hit.partial_block = -1;
  if (s.swapped) {
    swap_in(draft, s);
  } else {
    start_from_prefix(draft, s, hit);
  }
  std::erase(waiting_, sequence);
  running_.push_back(sequence);
  if (s.state == RequestState::kPrefill) {
    plan_chunk(draft, sequence);
  } else if (can_draw(s) &&
             s.computed < static_cast<int64_t>(s.blocks.size()) * facts_.block_size) {
    add_part(draft, sequence, 1);
  }
  return Resource::kNothing;
}

PrefixIdentity Scheduler::identity(const Sequence& sequence) const {
  return {.adapter = sequence.spec().adapter,
          .weights_version = facts_.weights_version,
          .long_rope = sequence.long_rope,
          .salt = sequence.spec().cache_salt};
}

PrefixHit Scheduler::find_prefix(const Sequence& sequence) const {
  if (!shares_ || sequence.given > 0) return {};
  PrefixIdentity wanted = identity(sequence);
  wanted.long_rope = facts_.rope_border > 0 && sequence.known() > facts_.rope_border;
  // The last token is computed, and so are those before which a log-probability is wanted.
  int64_t most = sequence.known() - 1;
  if (sequence.scored < sequence.prompt) most = std::min(most, sequence.scored - 1);
  return blocks_.index().find(wanted, sequence.ids, most);
}

void Scheduler::start(Draft& draft, Sequence& sequence) {
  sequence.slot = free_slots_.back();
  free_slots_.pop_back();
  ++sequence.residency;
  sequence.last_step = draft.plan.step;
  if (sequence.scheduled_ns < 0) sequence.scheduled_ns = draft.now_ns;
  draft.plan.starts.push_back(slot_start(sequence));
}

void Scheduler::start_from_prefix(Draft& draft, Sequence& sequence, const PrefixHit& hit) {
  start(draft, sequence);
  move(sequence, RequestEvent::kScheduled, RequestState::kPrefill);
  sequence.long_rope = facts_.rope_border > 0 && sequence.known() > facts_.rope_border;
  sequence.publishes = shares_ && sequence.given == 0;
  for (const int32_t block : hit.blocks) blocks_.retain(block);
  sequence.blocks = hit.blocks;
  sequence.published = static_cast<int32_t>(hit.blocks.size());
  sequence.node = hit.last;
  sequence.computed = static_cast<int64_t>(hit.blocks.size()) * facts_.block_size;
  if (hit.partial_block >= 0) {
    blocks_.retain(hit.partial_block);
    const int32_t copy = blocks_.take();
    draft.plan.copies.push_back(
        {hit.partial_block, copy, static_cast<int32_t>(hit.partial_tokens)});
    blocks_.release(hit.partial_block, draft.plan.step);
    sequence.blocks.push_back(copy);
    sequence.computed += hit.partial_tokens;
  }
  sequence.ended = sequence.computed;
  if (sequence.cached_tokens < 0) sequence.cached_tokens = sequence.computed;
}

void Scheduler::swap_in(Draft& draft, Sequence& sequence) {
  start(draft, sequence);
  const bool decodes = sequence.computed + 1 == sequence.known() && sequence.draws > 0;
  move(sequence, RequestEvent::kScheduled,
       decodes ? RequestState::kDecode : RequestState::kPrefill);
  sequence.dropped = std::exchange(sequence.host_dropped, 0);
  sequence.blocks.assign(static_cast<size_t>(sequence.dropped), kNoBlock);
  for (const int32_t host : sequence.host_blocks) {
    sequence.blocks.push_back(blocks_.take());
    draft.plan.swap_in.push_back({sequence.blocks.back(), host});
    pending_host_blocks_.emplace_back(draft.plan.step, host);
  }
  sequence.host_blocks.clear();
  if (sequence.host_state >= 0) {
    draft.plan.state_swap_in.push_back({sequence.slot, sequence.host_state});
    pending_host_states_.emplace_back(draft.plan.step, sequence.host_state);
    sequence.host_state = -1;
  }
  sequence.swapped = false;
  sequence.ended = sequence.computed;
}

SlotStart slot_start(const Sequence& sequence) {
  const RequestSpec& spec = sequence.spec();
  SlotStart start;
  start.slot = sequence.slot;
  start.request = sequence.request;
  start.choice = spec.first_choice + sequence.choice;
  start.adapter = spec.adapter;
  start.prompt_length = sequence.prompt;
  start.ids = sequence.ids;
  start.rows = spec.rows;
  start.state_input = spec.state_input;
  start.sampling = spec.sampling;
  start.log_probabilities = spec.log_probabilities;
  start.min_tokens = spec.stop.min_tokens;
  start.ends = ends_of(spec.stop);
  return start;
}

void Scheduler::add_part(Draft& draft, const std::shared_ptr<Sequence>& sequence, int64_t rows) {
  Sequence& s = *sequence;
  PlanPart part;
  part.slot = s.slot;
  part.first = s.computed;
  part.count = static_cast<int32_t>(rows);
  part.known = s.length();
  part.stood = std::exchange(s.stood, 0);
  const int64_t end = s.computed + rows;
  // Row i gives the log-probability of position first + i + 1.
  if (s.scored < s.prompt && s.scored <= end) {
    part.score_first = static_cast<int32_t>(s.scored - 1 - s.computed);
    part.score_count = static_cast<int32_t>(std::min(end, s.prompt - 1) - (s.scored - 1));
    s.scored += part.score_count;
  }
  part.draws = end == s.length() && s.draws < s.spec().stop.max_tokens;
  part.masked = part.draws && s.grammar.has_value();
  if (s.state == RequestState::kPrefill)
    move(s, RequestEvent::kChunkDone,
         end == s.length() ? RequestState::kDecode : RequestState::kPrefill);
  draft.rows += rows;
  draft.context += chunk_context(s.computed, rows);
  s.computed = end;
  s.last_step = s.last_part = draft.plan.step;
  draft.parts.push_back({sequence, part});
}

void Scheduler::announce_blocks(StepPlan& plan, Sequence& sequence) {
  BlockChange change;
  change.slot = sequence.slot;
  const auto announced = static_cast<size_t>(sequence.announced);
  // Leading entries that were announced as blocks and are behind the window by now.
  change.leading_dropped = std::min(sequence.dropped, sequence.announced) -
                           std::min(sequence.announced_dropped, sequence.announced);
  change.appended.assign(sequence.blocks.begin() + static_cast<std::ptrdiff_t>(announced),
                         sequence.blocks.end());
  sequence.announced = static_cast<int32_t>(sequence.blocks.size());
  sequence.announced_dropped = sequence.dropped;
  if (change.leading_dropped > 0 || !change.appended.empty())
    plan.blocks.push_back(std::move(change));
}

StepPlan Scheduler::finish_plan(Draft& draft) {
  StepPlan& plan = draft.plan;
  std::ranges::stable_partition(draft.parts, [](const Part& p) { return p.part.count == 1; });
  InFlight step;
  step.step = plan.step;
  step.rows = draft.rows;
  step.context = draft.context;
  for (auto& [sequence, part, drafts, masks] : draft.parts) {
    const int64_t end = part.first + part.count - part.drafts;
    for (int64_t position = part.first; position < end; ++position)
      plan.tokens.push_back(position < sequence->given     ? kGivenRow
                            : position < sequence->known() ? sequence->id_at(position)
                                                           : kLastSampled);
    plan.tokens.insert(plan.tokens.end(), drafts.begin(), drafts.end());
    for (int32_t i = 0; i < part.score_count; ++i)
      plan.targets.push_back(sequence->id_at(part.first + part.score_first + i + 1));
    if (part.draws) {
      ++sequence->draws;
      sequence->last_draw = plan.step;
      if (sequence->grammar) {
        const std::span<const uint32_t> mask = sequence->grammar->mask();
        plan.masks.insert(plan.masks.end(), mask.begin(), mask.end());
        plan.masks.insert(plan.masks.end(), masks.begin(), masks.end());
      }
      sequence->unread_drafts = !drafts.empty();
    }
    plan.parts.push_back(part);
    step.entries.push_back({.sequence = sequence,
                            .residency = sequence->residency,
                            .end = end,
                            .scores = part.score_count,
                            .draws = part.draws,
                            .prompt_ends = part.first < sequence->prompt && end >= sequence->prompt,
                            .drafts = std::move(drafts)});
  }
  for (const auto& sequence : running_) announce_blocks(plan, *sequence);
  plan.weights_version = facts_.weights_version;
  plan.previous_hash = last_hash_;
  plan.releases = std::exchange(released_slots_, {});
  if (config_.poison_freed_blocks) plan.poison = blocks_.take_freed();
  last_hash_ = hash(plan);
  last_step_ = plan.step;
  step_tokens_ += static_cast<uint64_t>(draft.rows);
  in_flight_.push_back(std::move(step));
  return std::move(plan);
}

}  // namespace megatron
