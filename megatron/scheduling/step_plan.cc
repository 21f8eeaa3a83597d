#include "megatron/scheduling/step_plan.h"

#include <xxhash.h>

#include <algorithm>
#include <type_traits>

#include "megatron/base/check.h"
#include "megatron/scheduling/byte_io.h"

namespace megatron {
namespace {

template <class Io, class T>
void visit(Io& io, T& value);

template <class Io, class T>
void visit_list(Io& io, std::vector<T>& list) {
  size_t count = list.size();
  io.size(count);
  if constexpr (Io::kReads) list.resize(count);
  for (T& element : list) visit(io, element);
}

// A list of numbers in one piece.
template <class Io, class T>
  requires std::is_arithmetic_v<T>
void visit_list(Io& io, std::vector<T>& list) {
  size_t count = list.size();
  io.size(count);
  if constexpr (Io::kReads) list.resize(count);
  for (T& element : list) io(element);
}

template <class Io, class T>
void visit_shared(Io& io, std::shared_ptr<const T>& shared) {
  bool present = shared != nullptr;
  io(present);
  if (!present) return;
  T copy;
  if constexpr (!Io::kReads) copy = *shared;
  visit(io, copy);
  if constexpr (Io::kReads) shared = std::make_shared<const T>(std::move(copy));
}

template <class Io, class... Members>
void visit_all(Io& io, Members&... members) {
  (visit(io, members), ...);
}

template <class Io>
void visit_members(Io& io, GivenRows& v) {
  visit_all(io, v.count, v.width, v.values, v.ends, v.positions, v.ids);
}
template <class Io>
void visit_members(Io& io, StateInput& v) {
  visit_all(io, v.ids, v.shape, v.values);
}
template <class Io>
void visit_members(Io& io, std::pair<int32_t, float>& v) {
  visit_all(io, v.first, v.second);
}
template <class Io>
void visit_members(Io& io, SamplingParameters& v) {
  visit_all(io, v.temperature, v.top_k, v.top_p, v.min_p, v.repetition_penalty, v.presence_penalty,
            v.frequency_penalty, v.logit_bias, v.forbidden, v.seed);
}
template <class Io>
void visit_members(Io& io, LogProbabilityWishes& v) {
  visit_all(io, v.output_top, v.prompt_top, v.prompt_from, v.processed);
}
template <class Io>
void visit_members(Io& io, SlotStart& v) {
  visit_all(io, v.slot, v.request, v.choice, v.adapter, v.prompt_length, v.ids, v.rows,
            v.state_input, v.sampling, v.log_probabilities, v.min_tokens, v.ends);
}
template <class Io>
void visit_members(Io& io, BlockChange& v) {
  visit_all(io, v.slot, v.leading_dropped, v.appended);
}
template <class Io>
void visit_members(Io& io, PlanPart& v) {
  visit_all(io, v.slot, v.first, v.count, v.known, v.score_first, v.score_count, v.draws, v.masked,
            v.drafts, v.stood);
}
template <class Io>
void visit_members(Io& io, BlockCopy& v) {
  visit_all(io, v.from, v.to, v.positions);
}
template <class Io>
void visit_members(Io& io, Swap& v) {
  visit_all(io, v.device, v.host);
}
template <class Io>
void visit_members(Io& io, StepPlan& v) {
  visit_all(io, v.step, v.previous_hash, v.weights_version, v.releases, v.swap_out, v.swap_in,
            v.state_swap_out, v.state_swap_in, v.copies, v.poison, v.starts, v.blocks, v.parts,
            v.tokens, v.targets, v.masks);
}

template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;
template <class T>
constexpr bool kIsShared = false;
template <class T>
constexpr bool kIsShared<std::shared_ptr<const T>> = true;

template <class Io, class T>
void visit(Io& io, T& value) {
  if constexpr (std::is_arithmetic_v<T> || std::is_enum_v<T>)
    io(value);
  else if constexpr (kIsList<T>)
    visit_list(io, value);
  else if constexpr (kIsShared<T>)
    visit_shared(io, value);
  else
    visit_members(io, value);
}

}  // namespace

int64_t StepPlan::num_draws() const {
  int64_t sum = 0;
  for (const PlanPart& part : parts) sum += part.num_draws();
  return sum;
}

std::string serialise(const StepPlan& plan) {
  ByteWriter writer;
  writer(kStepPlanVersion);
  StepPlan copy = plan;
  visit(writer, copy);
  return std::move(writer.bytes);
}

StepPlan parse_step_plan(std::string_view bytes) {
  ByteReader reader(bytes, "a step plan");
  int32_t version = 0;
  reader(version);
  MEGATRON_CHECK(version == kStepPlanVersion, "a step plan has version ", version, ", expected ",
                 kStepPlanVersion);
  StepPlan plan;
  visit(reader, plan);
  reader.finish();
  return plan;
}

uint64_t hash(const StepPlan& plan) {
  const std::string bytes = serialise(plan);
  const uint64_t value = XXH3_64bits(bytes.data(), bytes.size());
  return value != 0 ? value : 1;
}

void BlockTables::apply(const StepPlan& plan) {
  const auto table = [&](int32_t slot) -> std::vector<int32_t>& {
    MEGATRON_ASSERT(slot >= 0 && static_cast<size_t>(slot) < tables_.size(), "slot ", slot, " of ",
                    tables_.size());
    return tables_[static_cast<size_t>(slot)];
  };
  for (const int32_t slot : plan.releases) table(slot).clear();
  for (const SlotStart& start : plan.starts)
    MEGATRON_ASSERT(table(start.slot).empty(), "slot ", start.slot, " starts and has blocks");
  for (const BlockChange& change : plan.blocks) {
    std::vector<int32_t>& blocks = table(change.slot);
    auto live =
        std::find_if(blocks.begin(), blocks.end(), [](int32_t block) { return block != kNoBlock; });
    MEGATRON_ASSERT(blocks.end() - live >= change.leading_dropped, "slot ", change.slot, " drops ",
                    change.leading_dropped, " of ", blocks.end() - live, " blocks");
    std::fill_n(live, change.leading_dropped, kNoBlock);
    blocks.insert(blocks.end(), change.appended.begin(), change.appended.end());
  }
}

}  // namespace megatron
