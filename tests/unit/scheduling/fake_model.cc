#include "fake_model.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/scheduling/grammar_follower.h"

namespace megatron {
namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15 ^ (b + 0x7f4a7c15) * 0xbf58476d1ce4e5b9;
  x ^= x >> 29;
  x *= 0x94d049bb133111eb;
  return x ^ x >> 32;
}

uint64_t hash_row(const GivenRows& rows, int64_t row) {
  uint64_t hash = 77;
  for (int64_t i = row * rows.width; i < (row + 1) * rows.width; ++i)
    hash = mix(hash, static_cast<uint64_t>(rows.values[static_cast<size_t>(i)] * 1000));
  return hash;
}

uint64_t first_state(const StateInput* input) {
  uint64_t state = 5;
  if (input != nullptr)
    for (const int32_t id : input->ids) state = mix(state, static_cast<uint64_t>(id));
  return state;
}

// Everything but the earlier positions that the content of a position depends on.
struct Setting {
  int32_t adapter;
  bool long_rope;
  int64_t version;
};

uint64_t content_of(const Setting& setting, uint64_t token, int64_t position, uint64_t state,
                    uint64_t context) {
  uint64_t hash = mix(token, static_cast<uint64_t>(position));
  hash = mix(hash, static_cast<uint64_t>(setting.adapter + 10));
  hash = mix(hash, setting.long_rope ? 3 : 4);
  hash = mix(hash, static_cast<uint64_t>(setting.version));
  return mix(mix(hash, state), context);
}

uint64_t term(uint64_t content, int64_t position) {
  return mix(content, static_cast<uint64_t>(position) + 99);
}

PositionLogProbabilities probabilities(uint64_t content, int32_t id, int32_t top, int64_t vocab) {
  const auto of = [&](int32_t token) {
    return -static_cast<float>(mix(content, static_cast<uint64_t>(token)) % 1000) / 100.0f;
  };
  PositionLogProbabilities out;
  out.chosen = {id, of(id)};
  for (int32_t i = 0; i < top; ++i) {
    const auto token =
        static_cast<int32_t>((content + static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocab));
    out.top.push_back({token, of(token)});
  }
  return out;
}

// The token for `position`, after `ids`.
DrawnToken draw(const SlotStart& start, const FakeOptions& options, int64_t version,
                uint64_t content, int64_t position, std::span<const int32_t> ids,
                std::span<const uint32_t> mask) {
  const int64_t vocab = options.facts.vocab_size;
  if (!options.keys_depend_on_weights) content = mix(content, static_cast<uint64_t>(version));
  uint64_t hash = content;
  if (start.sampling.temperature > 0) {
    hash = mix(hash, start.sampling.seed);
    hash = mix(hash, static_cast<uint64_t>(start.choice));
    hash = mix(hash, static_cast<uint64_t>(position));
  }
  if (start.sampling.repetition_penalty != 1.0)
    for (const int32_t id : ids) hash += mix(static_cast<uint64_t>(id), 1234);
  DrawnToken drawn;
  drawn.slot = start.slot;
  drawn.id = static_cast<int32_t>(hash % static_cast<uint64_t>(vocab));
  if (position < start.prompt_length + start.min_tokens)
    while (std::ranges::count(start.ends, drawn.id) > 0)
      drawn.id = static_cast<int32_t>((drawn.id + 1) % vocab);
  while (!mask.empty() && !is_allowed(mask, drawn.id))
    drawn.id = static_cast<int32_t>((drawn.id + 1) % vocab);
  drawn.finite = position != start.prompt_length + 3 ||
                 std::ranges::count(start.sampling.forbidden, kBreaksLogits) == 0;
  if (start.log_probabilities.output_top >= 0)
    drawn.log_probabilities =
        probabilities(content, drawn.id, start.log_probabilities.output_top, vocab);
  return drawn;
}

}  // namespace

FakeModel::FakeModel(const FakeOptions& options)
    : options_(options),
      tables_(options.facts.slots),
      device_(static_cast<size_t>(options.facts.device_blocks),
              Block(static_cast<size_t>(options.facts.block_size))),
      host_(static_cast<size_t>(options.facts.host_blocks)),
      slots_(static_cast<size_t>(options.facts.slots)),
      host_states_(static_cast<size_t>(options.facts.host_states)) {}

void FakeModel::drop_cache() {
  for (Block& block : device_) block.assign(block.size(), Cell{});
}

FakeModel::Cell& FakeModel::cell(int32_t slot, int64_t position) {
  const auto blocks = tables_.blocks(slot);
  const auto index = static_cast<size_t>(position / options_.facts.block_size);
  MEGATRON_ASSERT(index < blocks.size() && blocks[index] != kNoBlock, "slot ", slot,
                  " has no block for position ", position);
  return device_.at(static_cast<size_t>(blocks[index]))
      .at(static_cast<size_t>(position % options_.facts.block_size));
}

void FakeModel::move_blocks(const StepPlan& plan) {
  for (const Swap& swap : plan.swap_out)
    host_.at(static_cast<size_t>(swap.host)) = device_.at(static_cast<size_t>(swap.device));
  for (const Swap& swap : plan.state_swap_out)
    host_states_.at(static_cast<size_t>(swap.host)) =
        slots_.at(static_cast<size_t>(swap.device)).held;
  for (const int32_t block : plan.poison) {
    Block& poisoned = device_.at(static_cast<size_t>(block));
    poisoned.assign(poisoned.size(), Cell{});
  }
  start_slots(plan);
  tables_.apply(plan);
  for (const Swap& swap : plan.swap_in)
    device_.at(static_cast<size_t>(swap.device)) = host_.at(static_cast<size_t>(swap.host));
  for (const Swap& swap : plan.state_swap_in)
    slots_.at(static_cast<size_t>(swap.device)).held =
        host_states_.at(static_cast<size_t>(swap.host));
  for (const BlockCopy& copy : plan.copies) {
    Block& to = device_.at(static_cast<size_t>(copy.to));
    const Block& from = device_.at(static_cast<size_t>(copy.from));
    MEGATRON_ASSERT(copy.positions > 0 && copy.from != copy.to, "a copy of nothing");
    to.assign(to.size(), Cell{});
    std::copy_n(from.begin(), copy.positions, to.begin());
  }
}

void FakeModel::start_slots(const StepPlan& plan) {
  for (const int32_t slot : plan.releases) {
    MEGATRON_ASSERT(slots_.at(static_cast<size_t>(slot)).used, "slot ", slot, " is not used");
    slots_[static_cast<size_t>(slot)] = {};
  }
  for (const SlotStart& start : plan.starts) {
    Slot& slot = slots_.at(static_cast<size_t>(start.slot));
    MEGATRON_ASSERT(!slot.used, "slot ", start.slot, " is used");
    slot = {};
    slot.used = true;
    slot.start = start;
    slot.ids = start.ids;
  }
}

// No block that a part writes is in the list of another slot.
void FakeModel::check_holders() const {
  std::map<int32_t, int> holders;
  for (int32_t slot = 0; slot < options_.facts.slots; ++slot)
    for (const int32_t block : tables_.blocks(slot))
      if (block != kNoBlock) ++holders[block];
  for (int32_t slot = 0; slot < options_.facts.slots; ++slot) {
    const int64_t next = slots_[static_cast<size_t>(slot)].next;
    const auto blocks = tables_.blocks(slot);
    for (auto i = static_cast<size_t>(std::max<int64_t>(0, next) / options_.facts.block_size);
         next >= 0 && i < blocks.size(); ++i)
      MEGATRON_ASSERT(holders[blocks[i]] == 1, "block ", blocks[i], " is written and shared");
  }
}

void FakeModel::compute(const StepPlan& plan, const PlanPart& part, Place& at, StepResult& result) {
  const RunnerFacts& facts = options_.facts;
  Slot& slot = slots_.at(static_cast<size_t>(part.slot));
  MEGATRON_ASSERT(slot.used && part.count > 0 && part.known >= part.first + part.count,
                  "a part of slot ", part.slot);
  MEGATRON_ASSERT(slot.next < 0 || slot.next == part.first, "slot ", part.slot, " goes on at ",
                  part.first, ", expected ", slot.next);
  const Setting setting = {slot.start.adapter,
                           facts.rope_border > 0 && part.known > facts.rope_border,
                           options_.keys_depend_on_weights ? plan.weights_version : 0};
  if (part.first == 0) slot.held = {first_state(slot.start.state_input.get()), {}};
  // A state reads drafts when they stand.
  Held& held = slot.held;
  MEGATRON_ASSERT(!facts.owns_state || (part.stood >= 0 && part.stood <= std::ssize(held.drafts)),
                  "slot ", part.slot, " has ", held.drafts.size(), " drafts, and ", part.stood,
                  " stand");
  for (int32_t i = 0; facts.owns_state && i < part.stood; ++i)
    held.state = mix(held.state, held.drafts[static_cast<size_t>(i)]);
  held.drafts.clear();
  uint64_t state = held.state;
  MEGATRON_ASSERT(part.drafts == 0 || (part.draws && part.drafts < part.count), "drafts");
  // A draft that does not stand is drawn over; nothing behind it counts.
  const int64_t first_draw = part.first + part.count - part.drafts - 1;
  bool stands = true;
  int64_t next = part.first + part.count;
  for (int64_t p = part.first; p < part.first + part.count; ++p) {
    const int32_t id = plan.tokens.at(at.token++);
    uint64_t key = 0;
    if (id == kGivenRow) {
      key = hash_row(*slot.start.rows, p);
    } else if (id == kLastSampled) {
      MEGATRON_ASSERT(slot.drawn_for == p && slot.drawn_in + facts.draw_latency <= plan.step,
                      "slot ", part.slot, " has no drawn token for position ", p);
      key = static_cast<uint64_t>(slot.last_drawn);
    } else {
      key = static_cast<uint64_t>(id);
    }
    state = mix(state, key);
    if (p <= first_draw)
      held.state = state;
    else
      held.drafts.push_back(key);
    uint64_t context = 0;
    for (int64_t q = facts.window > 0 ? std::max<int64_t>(0, p - facts.window + 1) : 0; q < p;
         ++q) {
      const Cell& seen = cell(part.slot, q);
      MEGATRON_ASSERT(seen.written && seen.position == q, "slot ", part.slot, " reads position ", q,
                      " which was not written");
      context += term(seen.content, q);
    }
    const uint64_t content = content_of(setting, key, p, facts.owns_state ? state : 0, context);
    cell(part.slot, p) = {true, p, content};
    const int64_t row = p - part.first;
    if (row >= part.score_first && row < part.score_first + part.score_count)
      result.scores.push_back(probabilities(content, plan.targets.at(at.target++),
                                            slot.start.log_probabilities.prompt_top,
                                            facts.vocab_size));
    if (!part.draws || p < first_draw) continue;
    std::span<const uint32_t> mask;
    if (part.masked) {
      const auto words = static_cast<size_t>(token_mask_words(facts.vocab_size));
      mask = std::span(plan.masks).subspan(at.mask, words);
      at.mask += words;
    }
    stands = stands && (p == first_draw || id == slot.last_drawn);
    std::vector<int32_t> ids = slot.ids;
    if (!stands) ids.push_back(id);  // whatever
    const DrawnToken drawn =
        draw(slot.start, options_, plan.weights_version, content, p + 1, ids, mask);
    result.draws.push_back(drawn);
    if (!stands) continue;
    next = p + 1;
    slot.last_drawn = drawn.id;
    slot.ids.push_back(drawn.id);
  }
  slot.next = next;
  // With drafts the host says what comes next.
  slot.drawn_for = part.draws && part.drafts == 0 ? next : -1;
  slot.drawn_in = plan.step;
  rows_ += part.count;
}

StepResult FakeModel::apply(const StepPlan& plan) {
  MEGATRON_ASSERT(plan.step == last_step_ + 1 && plan.previous_hash == last_hash_,
                  "a plan does not follow the one before");
  last_step_ = plan.step;
  last_hash_ = hash(plan);
  move_blocks(plan);
  StepResult result;
  result.step = plan.step;
  Place at;
  bool several = false;
  for (const PlanPart& part : plan.parts) {
    MEGATRON_ASSERT(!several || part.count > 1, "a part of one row comes after one of several");
    several |= part.count > 1;
    compute(plan, part, at, result);
  }
  MEGATRON_ASSERT(at.token == plan.tokens.size() && at.target == plan.targets.size() &&
                      at.mask == plan.masks.size(),
                  "tokens or masks that belong to no part");
  check_holders();
  return result;
}

RequestSpec counted_request(int64_t prompt, int64_t output, int32_t first) {
  RequestSpec spec;
  spec.prompt.resize(static_cast<size_t>(prompt));
  std::iota(spec.prompt.begin(), spec.prompt.end(), first);
  spec.stop.max_tokens = output;
  spec.sampling.seed = static_cast<uint64_t>(first);
  return spec;
}

AloneOutput run_alone(const FakeOptions& options, const RequestSpec& spec, int32_t choice,
                      std::span<const int64_t> versions) {
  const RunnerFacts& facts = options.facts;
  SlotStart start;
  start.choice = choice;
  start.prompt_length = prompt_positions(spec);
  start.sampling = spec.sampling;
  start.log_probabilities = spec.log_probabilities;
  start.min_tokens = spec.stop.min_tokens;
  start.ends = ends_of(spec.stop);
  std::optional<GrammarFollower> grammar;
  if (spec.grammar)
    grammar.emplace(*spec.grammar, facts.vocab_size, spec.sampling.forbidden, start.ends,
                    spec.stop.min_tokens);
  std::vector<int32_t> ids = spec.prompt;
  const int64_t given = spec.rows ? spec.rows->count : 0;
  AloneOutput output;
  std::vector<uint64_t> cells;
  Setting last{};
  uint64_t state = 0;
  // Contents of all positions; computed anew when they depend on something that has changed.
  const auto extend = [&](int64_t version) {
    const int64_t length = given + static_cast<int64_t>(ids.size());
    const Setting setting = {spec.adapter, facts.rope_border > 0 && length > facts.rope_border,
                             options.keys_depend_on_weights ? version : 0};
    if (cells.empty() || setting.long_rope != last.long_rope || setting.version != last.version) {
      cells.clear();
      state = facts.owns_state ? first_state(spec.state_input.get()) : 0;
    }
    last = setting;
    for (auto p = static_cast<int64_t>(cells.size()); p < length; ++p) {
      const uint64_t key = p < given ? hash_row(*spec.rows, p)
                                     : static_cast<uint64_t>(ids[static_cast<size_t>(p - given)]);
      if (facts.owns_state) state = mix(state, key);
      uint64_t context = 0;
      for (int64_t q = facts.window > 0 ? std::max<int64_t>(0, p - facts.window + 1) : 0; q < p;
           ++q)
        context += term(cells[static_cast<size_t>(q)], q);
      cells.push_back(content_of(setting, key, p, state, context));
    }
  };
  for (int64_t i = 0; i < std::max<int64_t>(1, spec.stop.max_tokens); ++i) {
    const int64_t version = versions.empty() ? facts.weights_version
                                             : versions[static_cast<size_t>(std::min<int64_t>(
                                                   i, static_cast<int64_t>(versions.size()) - 1))];
    extend(version);
    const auto length = static_cast<int64_t>(cells.size());
    if (i == 0 && choice == 0 && spec.log_probabilities.prompt_top >= 0)
      for (int64_t p = std::max<int64_t>(1, given + spec.log_probabilities.prompt_from); p < length;
           ++p)
        output.prompt.push_back(probabilities(cells[static_cast<size_t>(p - 1)],
                                              ids[static_cast<size_t>(p - given)],
                                              spec.log_probabilities.prompt_top, facts.vocab_size));
    if (spec.stop.max_tokens == 0) break;
    const DrawnToken drawn = draw(start, options, version, cells.back(), length, ids,
                                  grammar ? grammar->mask() : std::span<const uint32_t>());
    output.finite = drawn.finite;
    if (!drawn.finite) break;
    ids.push_back(drawn.id);
    output.ids.push_back(drawn.id);
    if (drawn.log_probabilities) output.log_probabilities.push_back(*drawn.log_probabilities);
    if (std::ranges::count(start.ends, drawn.id) > 0) break;
    if (grammar) grammar->advance(drawn.id);
    if (grammar && (grammar->has_ended() || !grammar->failure().empty())) break;
  }
  return output;
}

}  // namespace megatron
