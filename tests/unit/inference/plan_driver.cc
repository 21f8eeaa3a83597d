#include "tests/unit/inference/plan_driver.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

PlanDriver::PlanDriver(const RunnerFacts& facts, const DriverChances& chances, uint32_t seed,
                       std::function<void(const StepPlan&)> launch,
                       std::function<StepResult()> take)
    : facts_(facts),
      chances_(chances),
      random_(seed),
      launch_(std::move(launch)),
      take_(std::move(take)),
      uses_(static_cast<size_t>(facts.device_blocks), 0) {
  for (int32_t i = facts.device_blocks; i-- > 0;) free_.push_back(i);
  std::shuffle(free_.begin(), free_.end(), random_);
  for (int32_t i = facts.host_blocks; i-- > 0;) free_host_.push_back(i);
  for (int32_t i = facts.host_states; i-- > 0;) free_states_.push_back(i);
  freed_ = free_;  // all are poisoned first
}

PlanDriver::PlanDriver(StepRunner& runner, const DriverChances& chances, uint32_t seed)
    : PlanDriver(
          runner.facts(), chances, seed, [&](const StepPlan& plan) { runner.launch(plan); },
          [&] {
            auto result = runner.take(int64_t{60'000'000'000});
            MEGATRON_CHECK(result, "a step took a minute");
            return *result;
          }) {}

void PlanDriver::run(std::vector<DrivenSequence>& sequences) {
  sequences_ = &sequences;
  for (size_t i = 0; i < sequences.size(); ++i) waiting_.push_back(i);
  while (!waiting_.empty() || !again_.empty() || !swapped_.empty() || !running_.empty()) {
    StepPlan plan;
    plan.step = ++step_;
    end_finished(plan);
    if (chance(chances_.preempt)) preempt(plan);
    admit(plan);
    drop_behind_window(plan);
    Flight flight;
    flights_.push_back(flight);
    add_parts(plan);
    for (const int32_t block : freed_)
      if (uses_[static_cast<size_t>(block)] == 0) plan.poison.push_back(block);
    freed_.clear();
    launch_(plan);
    while (static_cast<int64_t>(flights_.size()) >= chances_.in_flight) read();
  }
  while (!flights_.empty()) read();
}

int64_t PlanDriver::known(const Running& r) const { return r.prompt + r.drawn; }

void PlanDriver::release(int32_t block) {
  if (block < 0 || --uses_[static_cast<size_t>(block)] > 0) return;
  free_.push_back(block);
  freed_.push_back(block);
}

bool PlanDriver::reserve(Running& r, int64_t positions, BlockChange& change) {
  const int64_t wanted = (positions + facts_.block_size - 1) / facts_.block_size;
  if (wanted - static_cast<int64_t>(r.blocks.size()) > static_cast<int64_t>(free_.size()))
    return false;
  while (static_cast<int64_t>(r.blocks.size()) < wanted) {
    const int32_t block = free_.back();
    free_.pop_back();
    ++uses_[static_cast<size_t>(block)];
    r.blocks.push_back(block);
    change.appended.push_back(block);
  }
  return true;
}

void PlanDriver::end_finished(StepPlan& plan) {
  for (auto i = running_.begin(); i != running_.end();) {
    const DrivenSequence& sequence = (*sequences_)[i->second.sequence];
    if (i->second.done < i->second.prompt || i->second.drawn < sequence.tokens) {
      ++i;
      continue;
    }
    plan.releases.push_back(i->first);
    for (const int32_t block : i->second.blocks) release(block);
    i = running_.erase(i);
  }
}

void PlanDriver::preempt(StepPlan& plan) {
  while (!flights_.empty()) read();  // what was drawn becomes known
  if (running_.empty()) return;
  auto chosen = running_.begin();
  std::advance(chosen, draw(0, static_cast<int64_t>(running_.size()) - 1));
  const int32_t slot = chosen->first;
  Running r = std::move(chosen->second);
  running_.erase(chosen);
  plan.releases.push_back(slot);
  const bool swap = chance(0.5) && r.blocks.size() <= free_host_.size() &&
                    (!facts_.owns_state || !free_states_.empty()) && r.done > 0;
  if (!swap) {
    for (const int32_t block : r.blocks) release(block);
    r.blocks.clear();
    r.done = r.stood = r.dropped = 0;
    again_.push_back(std::move(r));
    return;
  }
  ++swaps_;
  Swapped away;
  for (const int32_t block : r.blocks) {
    away.blocks.push_back(block < 0 ? -1 : free_host_.back());
    if (block < 0) continue;
    plan.swap_out.push_back({block, free_host_.back()});
    free_host_.pop_back();
    release(block);
  }
  if (facts_.owns_state) {
    away.state = free_states_.back();
    free_states_.pop_back();
    plan.state_swap_out.push_back({slot, away.state});
  }
  r.blocks.clear();
  away.running = std::move(r);
  swapped_.push_back(std::move(away));
}

void PlanDriver::admit(StepPlan& plan) {
  for (int32_t slot = 0; slot < facts_.slots; ++slot) {
    if (running_.contains(slot)) continue;
    if (!swapped_.empty() && chance(0.7)) {
      Swapped& away = swapped_.front();
      if (away.blocks.size() > free_.size()) return;
      BlockChange change{slot, 0, {}};
      Running r = std::move(away.running);
      for (const int32_t host : away.blocks) {
        const int32_t block = host < 0 ? kNoBlock : free_.back();
        r.blocks.push_back(block);
        change.appended.push_back(block);
        if (host < 0) continue;
        free_.pop_back();
        ++uses_[static_cast<size_t>(block)];
        plan.swap_in.push_back({block, host});
        free_host_.push_back(host);
      }
      if (away.state >= 0) {
        plan.state_swap_in.push_back({slot, away.state});
        free_states_.push_back(away.state);
      }
      swapped_.pop_front();
      plan.blocks.push_back(change);
      begin(plan, slot, std::move(r));
    } else if (!again_.empty()) {
      Running r = std::move(again_.front());
      again_.pop_front();
      begin(plan, slot, std::move(r));
    } else if (!waiting_.empty()) {
      Running r;
      r.sequence = waiting_.front();
      waiting_.pop_front();
      const SlotStart& start = (*sequences_)[r.sequence].start;
      r.ids = start.ids;
      r.prompt = static_cast<int64_t>(start.ids.size()) + (start.rows ? start.rows->count : 0);
      BlockChange change{slot, 0, {}};
      if (share(plan, r, change)) plan.blocks.push_back(change);
      begin(plan, slot, std::move(r));
    }
  }
}

void PlanDriver::begin(StepPlan& plan, int32_t slot, Running running) {
  SlotStart start = (*sequences_)[running.sequence].start;
  start.slot = slot;
  start.prompt_length = running.prompt;
  start.ids = running.ids;
  plan.starts.push_back(std::move(start));
  running_[slot] = std::move(running);
}

// Whole blocks of a running sequence of equal prompt are shared, the next one is copied.
bool PlanDriver::share(StepPlan& plan, Running& r, BlockChange& change) {
  if (facts_.rope_border > 0 || !chance(chances_.share)) return false;
  const SlotStart& own = (*sequences_)[r.sequence].start;
  for (const auto& [slot, other] : running_) {
    const SlotStart& start = (*sequences_)[other.sequence].start;
    if (own.log_probabilities.prompt_top >= 0 || start.ids != own.ids || start.rows ||
        start.adapter != own.adapter || other.dropped > 0)
      continue;
    const int64_t positions = std::min(other.done, r.prompt - 1);
    const int64_t whole = positions / facts_.block_size, rest = positions % facts_.block_size;
    if (positions == 0 || free_.empty()) continue;
    for (int64_t i = 0; i < whole; ++i) {
      r.blocks.push_back(other.blocks[static_cast<size_t>(i)]);
      ++uses_[static_cast<size_t>(r.blocks.back())];
    }
    if (rest > 0) {
      const int32_t block = free_.back();
      free_.pop_back();
      ++uses_[static_cast<size_t>(block)];
      plan.copies.push_back(
          {other.blocks[static_cast<size_t>(whole)], block, static_cast<int32_t>(rest)});
      r.blocks.push_back(block);
    }
    r.done = positions;
    change.appended = r.blocks;
    ++shared_;
    return true;
  }
  return false;
}

void PlanDriver::drop_behind_window(StepPlan& plan) {
  if (facts_.window == 0) return;
  for (auto& [slot, r] : running_) {
    int32_t dropped = 0;
    while ((r.dropped + 1) * facts_.block_size <= r.done - facts_.window + 1 &&
           r.dropped < static_cast<int64_t>(r.blocks.size())) {
      release(r.blocks[static_cast<size_t>(r.dropped)]);
      r.blocks[static_cast<size_t>(r.dropped++)] = kNoBlock;
      ++dropped;
    }
    dropped_ += dropped;
    if (dropped > 0) plan.blocks.push_back({slot, dropped, {}});
  }
}

// Longrope: what was rotated for a sequence within the border is computed anew beyond it.
void PlanDriver::compute_again_beyond_border() {
  for (auto& [slot, r] : running_) {
    if (r.done == 0) r.is_beyond = known(r) > facts_.rope_border;
    if (facts_.rope_border == 0 || r.is_beyond || known(r) <= facts_.rope_border) continue;
    while (flights_.size() > 1) read();  // the ids become known
    r.is_beyond = true;
    r.done = r.stood = 0;
    ++crossed_;
  }
}

void PlanDriver::add_parts(StepPlan& plan) {
  compute_again_beyond_border();
  struct Wanted {
    int64_t count = 0;  // rows, without drafts
    int32_t slot = 0;
    int64_t drafts = 0;
    bool is_one() const { return count + drafts == 1; }
  };
  std::vector<Wanted> wanted;
  for (auto& [slot, r] : running_) {
    const DrivenSequence& sequence = (*sequences_)[r.sequence];
    const int64_t ready = static_cast<int64_t>(r.ids.size()) + r.prompt -
                          static_cast<int64_t>(sequence.start.ids.size());
    const bool last_in_flight = r.done >= ready;
    if (r.has_drafts || r.done >= known(r) || (last_in_flight && step_ < r.free_at) ||
        chance(chances_.pause))
      continue;
    // Drafts continue tokens that were read.
    if (last_in_flight && chances_.drafts != nullptr && chance(0.5)) continue;
    const int64_t most = last_in_flight ? 1 : ready - r.done;
    wanted.push_back({chance(chances_.whole_prompts) ? most : draw(1, most), slot});
    if (!last_in_flight && r.done + 1 == known(r) && r.drawn > 0)
      wanted.back().drafts = draw_drafts(r);
  }
  std::ranges::stable_sort(wanted, std::greater(), &Wanted::is_one);
  std::vector<int32_t> added;
  for (const auto [count, slot, drafts] : wanted) {
    Running& r = running_[slot];
    BlockChange change{slot, 0, {}};
    if (!reserve(r, r.done + count + drafts, change)) continue;
    if (!change.appended.empty()) plan.blocks.push_back(change);
    add_part(plan, slot, count, drafts);
    added.push_back(slot);
  }
  if (!added.empty() || running_.empty()) return;
  // Nobody finds a block, unless all wait for a draw: the largest gives its own.
  for (const auto& [count, slot, drafts] : wanted) {
    Running r = std::move(running_[slot]);
    running_.erase(slot);
    while (flights_.size() > 1) read();
    plan.releases.push_back(slot);
    std::erase_if(plan.starts, [&](const SlotStart& start) { return start.slot == slot; });
    std::erase_if(plan.blocks, [&](const BlockChange& change) { return change.slot == slot; });
    for (const int32_t block : r.blocks) release(block);
    r.blocks.clear();
    r.done = r.stood = r.dropped = 0;
    const DrivenSequence& sequence = (*sequences_)[r.sequence];
    r.ids = sequence.start.ids;
    for (const DrawnToken& drawn : sequence.drawn) r.ids.push_back(drawn.id);
    again_.push_back(std::move(r));
    return;
  }
}

// How many drafts a sequence gets whose tokens are all known.
int64_t PlanDriver::draw_drafts(const Running& r) {
  if (chances_.drafts == nullptr) return 0;
  int64_t most = std::min(chances_.most_drafts, (*sequences_)[r.sequence].tokens - r.drawn - 1);
  if (facts_.rope_border > 0 && !r.is_beyond) most = std::min(most, facts_.rope_border - known(r));
  return most > 0 ? draw(0, most) : 0;
}

void PlanDriver::add_part(StepPlan& plan, int32_t slot, int64_t count, int64_t drafts) {
  Running& r = running_[slot];
  const DrivenSequence& sequence = (*sequences_)[r.sequence];
  const int64_t rows = sequence.start.rows ? sequence.start.rows->count : 0;
  PlanPart part;
  part.slot = slot;
  part.first = r.done;
  part.count = static_cast<int32_t>(count);
  part.known = std::max<int64_t>(known(r), r.done + count);
  part.stood = static_cast<int32_t>(std::exchange(r.stood, 0));
  for (int64_t p = r.done; p < r.done + count; ++p) {
    const int64_t index = p - rows;
    plan.tokens.push_back(index < 0 ? kGivenRow
                          : index < static_cast<int64_t>(r.ids.size())
                              ? r.ids[static_cast<size_t>(index)]
                              : kLastSampled);
    // The first id behind given rows is scored as well.
    if (sequence.start.log_probabilities.prompt_top < 0 || p + 1 >= r.prompt || index + 1 < 0 ||
        static_cast<int64_t>(sequence.scores.size()) > index + 1 - (rows == 0 ? 1 : 0))
      continue;
    if (part.score_count == 0) part.score_first = static_cast<int32_t>(p - r.done);
    ++part.score_count;
    plan.targets.push_back(r.ids[static_cast<size_t>(index + 1)]);
    flights_.back().scores.push_back(r.sequence);
  }
  r.done += count;
  part.draws = r.done == known(r) && r.drawn < sequence.tokens;
  if (part.draws) {
    flights_.back().draws.push_back({slot, r.sequence});
    Flight::Draw& draw = flights_.back().draws.back();
    for (int64_t i = 0; i < drafts; ++i) {
      const DrivenSequence& right = (*chances_.drafts)[r.sequence];
      const int32_t id = right.drawn[static_cast<size_t>(r.drawn + i)].id;
      draw.drafts.push_back(chance(0.2) ? (id + 1) % 50 : id);
    }
    part.drafts = static_cast<int32_t>(drafts);
    part.count += part.drafts;
    part.known += part.drafts;
    plan.tokens.insert(plan.tokens.end(), draw.drafts.begin(), draw.drafts.end());
    r.has_drafts = drafts > 0;
    drafted_ += drafts;
    ++r.drawn;
    r.free_at = step_ + facts_.draw_latency;
  }
  plan.parts.push_back(part);
}

size_t PlanDriver::Flight::num_draws() const {
  size_t sum = 0;
  for (const Draw& draw : draws) sum += 1 + draw.drafts.size();
  return sum;
}

void PlanDriver::read() {
  const StepResult result = take_();
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  MEGATRON_CHECK(
      result.draws.size() == flight.num_draws() && result.scores.size() == flight.scores.size(),
      result.draws.size(), " draws and ", result.scores.size(), " scores, expected ",
      flight.num_draws(), " and ", flight.scores.size());
  auto drawn = result.draws.begin();
  for (const auto& [slot, sequence, drafts] : flight.draws) {
    bool stands = true;
    for (size_t i = 0; i <= drafts.size(); ++i, ++drawn) {
      MEGATRON_CHECK(drawn->slot == slot, "draws are in another order");
      if (!stands) continue;
      (*sequences_)[sequence].drawn.push_back(*drawn);
      accepted_ += i > 0 ? 1 : 0;
      for (auto& [at, r] : running_) {
        if (r.sequence != sequence) continue;
        r.ids.push_back(drawn->id);
        r.has_drafts = false;
        r.done += i > 0 ? 1 : 0;
        r.stood += i > 0 ? 1 : 0;
        r.drawn += i > 0 ? 1 : 0;
      }
      stands = i < drafts.size() && drawn->id == drafts[i];
    }
  }
  for (size_t i = 0; i < flight.scores.size(); ++i)
    (*sequences_)[flight.scores[i]].scores.push_back(result.scores[i]);
}

namespace {

// The text of rank 0 on every rank.
std::string shared_text(const ProcessGroup& world, at::Device device, std::string text) {
  const at::Tensor size = at::tensor({static_cast<int64_t>(text.size())}).to(device);
  world.broadcast(size, 0)->wait();
  text.resize(static_cast<size_t>(size.item<int64_t>()));
  if (text.empty()) return text;
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<uint8_t>());
  bytes = bytes.to(device);
  world.broadcast(bytes, 0)->wait();
  bytes = bytes.cpu();
  std::copy_n(bytes.const_data_ptr<uint8_t>(), text.size(), text.begin());
  return text;
}

}  // namespace

int64_t drive_ranks(const ProcessGroup& world, StepRunner& runner, const DriverChances& chances,
                    uint32_t seed, std::vector<DrivenSequence>& sequences, at::Device device) {
  if (world.rank() == 0) {
    PlanDriver driver(
        runner.facts(), chances, seed,
        [&](const StepPlan& plan) {
          shared_text(world, device, serialise(plan));
          runner.launch(plan);
        },
        [&] {
          auto result = runner.take(int64_t{60'000'000'000});
          MEGATRON_CHECK(result, "a step took a minute");
          return *result;
        });
    driver.run(sequences);
    shared_text(world, device, "");
    return driver.accepted();
  }
  for (;;) {
    const std::string plan = shared_text(world, device, "");
    if (plan.empty()) return 0;
    runner.launch(parse_step_plan(plan));
    const auto result = runner.take(0);
    MEGATRON_CHECK(!result || (result->draws.empty() && result->scores.empty()),
                   "only the first rank has results");
  }
}

}  // namespace megatron
