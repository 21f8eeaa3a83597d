#include "megatron/inference/speculation/draft_model.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/scheduling/token_grammar.h"

namespace megatron {
namespace {

constexpr int64_t kDraftWaitNs = 100'000'000;

CacheBlocks::Options block_options(const RunnerFacts& facts, const DraftModelOptions& options) {
  return {.blocks = facts.device_blocks,
          .block_size = facts.block_size,
          .record_freed = options.poison_freed_blocks};
}

// How the draft model draws for a sequence: as the target does, among the ids that it has.
SlotStart draft_start(const Sequence& sequence, int32_t slot, int64_t vocab_size) {
  SlotStart start = slot_start(sequence);
  start.slot = slot;
  start.adapter = -1;
  start.log_probabilities = {};
  SamplingParameters& how = start.sampling;
  const bool counts =
      how.repetition_penalty != 1.0 || how.presence_penalty != 0.0 || how.frequency_penalty != 0.0;
  if (!counts) start.ids.clear();
  const auto unknown = [&](int32_t id) { return id >= vocab_size; };
  std::erase_if(how.logit_bias, [&](const auto& bias) { return unknown(bias.first); });
  std::erase_if(how.forbidden, unknown);
  std::erase_if(start.ends, unknown);
  return start;
}

}  // namespace

DraftModel::DraftModel(StepRunner& runner, const DraftModelOptions& options)
    : runner_(runner), options_(options), blocks_(block_options(runner.facts(), options)) {
  const RunnerFacts& facts = runner.facts();
  MEGATRON_CHECK(!facts.owns_state && !facts.needs_state_input,
                 "a draft model takes back what it has read where a text turns out otherwise, and "
                 "this one has states of fixed size, of which nothing can be taken back");
  MEGATRON_ASSERT(facts.draw_latency == 1, "a draft model of ", facts.draw_latency, " stages");
  MEGATRON_ASSERT(options.max_step_tokens >= facts.slots, "a step of ", options.max_step_tokens,
                  " tokens for ", facts.slots, " texts");
}

void DraftModel::forget(const Sequence& sequence) {
  const auto found = texts_.find({sequence.request, sequence.choice});
  if (found == texts_.end()) return;
  drop(found->second);
  texts_.erase(found);
}

void DraftModel::forget_cache() {
  for (auto& [key, text] : texts_) drop(text);
  blocks_.forget_prefixes();
}

void DraftModel::drop(Text& text) {
  for (const int32_t block : text.blocks) blocks_.release(block, last_step_);
  text.blocks.clear();
  text.cached.clear();
  text.certain = 0;
  text.published = 0;
  text.node = {};
  text.publishes = false;
}

PrefixIdentity DraftModel::identity(const Sequence& sequence, const Text& text) const {
  return {.weights_version = runner_.facts().weights_version,
          .long_rope = text.long_rope,
          .salt = sequence.spec().cache_salt};
}

// Of what the cache has of the text. Its last id is read anyhow: it gives the first draft.
void DraftModel::keep_what_stands(Asked& asked) const {
  Text& text = *asked.text;
  const std::vector<int32_t>& ids = asked.query->sequence->ids;
  const int64_t most = std::min(std::ssize(text.cached), asked.length() - 1);
  int64_t equal = std::min(text.certain, most);
  while (equal < most && text.cached[static_cast<size_t>(equal)] == ids[static_cast<size_t>(equal)])
    ++equal;
  text.cached.resize(static_cast<size_t>(equal));
  text.certain = equal;
}

void DraftModel::start_from_prefix(Text& text, const Sequence& sequence) const {
  text.publishes = options_.share_prefixes;
  if (!text.publishes) return;
  const PrefixHit hit =
      blocks_.index().find(identity(sequence, text), sequence.ids, std::ssize(sequence.ids) - 1);
  for (const int32_t block : hit.blocks) blocks_.retain(block);
  text.blocks = hit.blocks;
  text.published = static_cast<int32_t>(hit.blocks.size());
  text.node = hit.last;
  text.certain = std::ssize(hit.blocks) * runner_.facts().block_size;
  text.cached.assign(sequence.ids.begin(), sequence.ids.begin() + text.certain);
}

// False: the text gets no drafts.
bool DraftModel::begin(Asked& asked) {
  const Sequence& sequence = *asked.query->sequence;
  const RunnerFacts& facts = runner_.facts();
  if (sequence.given > 0) return false;
  Text& text = texts_[{sequence.request, sequence.choice}];
  asked.text = &text;
  text.asked = calls_;
  for (; text.known_ids < asked.length(); ++text.known_ids)
    text.is_strange |= sequence.ids[static_cast<size_t>(text.known_ids)] >= facts.vocab_size;
  asked.most = asked.query->most;
  if (facts.max_positions > 0)
    asked.most = std::min(asked.most, facts.max_positions - asked.length() + 1);
  if (text.is_strange || asked.most < 1) return false;
  const bool crosses =
      facts.rope_border > 0 && !text.long_rope && asked.length() + asked.most > facts.rope_border;
  if (crosses) {
    drop(text);
    text.long_rope = true;
  }
  if (text.blocks.empty()) start_from_prefix(text, sequence);
  keep_what_stands(asked);
  return true;
}

bool DraftModel::evict_one() {
  Text* oldest = nullptr;
  for (auto& [key, text] : texts_)
    if (text.asked < calls_ && !text.blocks.empty() && (!oldest || text.asked < oldest->asked))
      oldest = &text;
  if (oldest) drop(*oldest);
  return oldest != nullptr;
}

bool DraftModel::take_blocks(Text& text, int64_t positions) {
  const int64_t size = runner_.facts().block_size;
  const int64_t more = (positions + size - 1) / size - std::ssize(text.blocks);
  while (blocks_.num_available() < more && evict_one()) {
  }
  if (blocks_.num_available() < more) return false;
  for (int64_t i = 0; i < more; ++i) text.blocks.push_back(blocks_.take());
  return true;
}

// Those that have rows in the first step; texts with few unread ids come first.
std::vector<DraftModel::Asked> DraftModel::choose(std::span<DraftQuery> queries) {
  std::vector<Asked> all;
  for (DraftQuery& query : queries) {
    Asked asked{.query = &query};
    if (begin(asked)) all.push_back(std::move(asked));
  }
  std::ranges::stable_sort(all, {}, &Asked::unread);
  std::vector<Asked> chosen;
  int64_t left = options_.max_step_tokens;
  for (Asked& asked : all) {
    asked.rows = std::min(asked.unread(), left);
    asked.drafts = asked.rows == asked.unread();
    const int64_t end = std::ssize(asked.text->cached) + asked.rows;
    if (asked.rows < 1 || !take_blocks(*asked.text, end + (asked.drafts ? asked.most - 1 : 0)))
      continue;
    left -= asked.rows;
    asked.slot = static_cast<int32_t>(chosen.size());
    chosen.push_back(std::move(asked));
  }
  MEGATRON_ASSERT(std::ssize(chosen) <= runner_.facts().slots, chosen.size(), " texts and ",
                  runner_.facts().slots, " slots of the draft model");
  std::ranges::stable_partition(chosen, [](const Asked& asked) { return asked.rows == 1; });
  return chosen;
}

PlanPart DraftModel::part_of(const Asked& asked, int64_t first, int64_t rows) const {
  PlanPart part;
  part.slot = asked.slot;
  part.first = first;
  part.count = static_cast<int32_t>(rows);
  part.known = asked.length() + asked.most;
  // What is beyond the border stays there.
  if (asked.text->long_rope) part.known = std::max(part.known, runner_.facts().rope_border + 1);
  return part;
}

void DraftModel::add_mask(StepPlan& plan, PlanPart& part, const Asked& asked) {
  part.masked = !asked.mask.empty();
  plan.masks.insert(plan.masks.end(), asked.mask.begin(), asked.mask.end());
}

// The mask of the draft behind those that the query has.
void DraftModel::next_mask(Asked& asked) const {
  GrammarFollower& grammar = *asked.query->sequence->grammar;
  const std::vector<int32_t>& drafts = asked.query->drafts;
  std::vector<uint32_t> masks(grammar.mask().begin(), grammar.mask().end());
  if (grammar.look_ahead(drafts, masks) < drafts.size() || masks.empty()) {
    asked.ended = true;
    return;
  }
  const auto words = static_cast<std::ptrdiff_t>(grammar.mask().size());
  asked.mask.assign(masks.end() - words, masks.end());
  // Of the ids that the draft model has.
  const int64_t vocab = runner_.facts().vocab_size;
  asked.mask.resize(static_cast<size_t>(token_mask_words(vocab)));
  if (vocab % 32 != 0) asked.mask.back() &= (uint32_t{1} << (vocab % 32)) - 1;
  asked.ended = std::ranges::all_of(asked.mask, [](uint32_t word) { return word == 0; });
}

void DraftModel::launch(StepPlan plan) {
  plan.step = ++last_step_;
  plan.previous_hash = last_hash_;
  plan.weights_version = runner_.facts().weights_version;
  if (options_.poison_freed_blocks) plan.poison = blocks_.take_freed();
  last_hash_ = hash(plan);
  rows_ += static_cast<uint64_t>(plan.rows());
  runner_.launch(plan);
}

void DraftModel::take(const Drawing& drawing) {
  std::optional<StepResult> result;
  for (int64_t waited = 0; !result; waited += kDraftWaitNs) {
    MEGATRON_CHECK(waited < options_.step_timeout_ns, "a step of the draft model has not ended in ",
                   static_cast<double>(options_.step_timeout_ns) / 1e9, " s");
    result = runner_.take(kDraftWaitNs);
  }
  MEGATRON_CHECK(result->draws.size() == drawing.size(), "the draft model gave ",
                 result->draws.size(), " tokens, expected ", drawing.size());
  for (size_t i = 0; i < drawing.size(); ++i) {
    Asked& asked = *drawing[i];
    const DrawnToken& drawn = result->draws[i];
    asked.ended |= !drawn.finite || drawn.id >= options_.vocab_size;
    if (!asked.ended) asked.query->drafts.push_back(drawn.id);
  }
}

// The first step: chunks of texts; those that are read draw.
DraftModel::Drawing DraftModel::read_texts(std::vector<Asked>& asked) {
  StepPlan plan;
  Drawing drawing;
  plan.releases = std::exchange(used_slots_, {});
  for (Asked& one : asked) {
    const Sequence& sequence = *one.query->sequence;
    used_slots_.push_back(one.slot);
    plan.starts.push_back(draft_start(sequence, one.slot, runner_.facts().vocab_size));
    plan.blocks.push_back({one.slot, 0, one.text->blocks});
    const auto first = std::ssize(one.text->cached);
    PlanPart part = part_of(one, first, one.rows);
    plan.tokens.insert(plan.tokens.end(), sequence.ids.begin() + first,
                       sequence.ids.begin() + first + one.rows);
    if (one.drafts && sequence.grammar) next_mask(one);
    if (one.drafts && !one.ended) {
      part.draws = true;
      add_mask(plan, part, one);
      drawing.push_back(&one);
    }
    plan.parts.push_back(part);
  }
  launch(std::move(plan));
  return drawing;
}

// A step that draws one more behind `drafted`; those that are to get one.
DraftModel::Drawing DraftModel::continue_drafts(Drawing drawing, int64_t drafted) {
  StepPlan plan;
  std::erase_if(drawing, [&](Asked* one) { return one->most <= drafted || one->ended; });
  for (Asked* one : drawing)
    if (one->query->sequence->grammar) next_mask(*one);
  std::erase_if(drawing, [](Asked* one) { return one->ended; });
  for (Asked* one : drawing) {
    PlanPart part = part_of(*one, one->length() + drafted - 1, 1);
    part.draws = true;
    add_mask(plan, part, *one);
    plan.tokens.push_back(kLastSampled);
    plan.parts.push_back(part);
  }
  if (!drawing.empty()) launch(std::move(plan));
  return drawing;
}

// Whole blocks in front of the last id, which may be read again.
void DraftModel::publish(Asked& asked) {
  Text& text = *asked.text;
  const std::span<const int32_t> ids = asked.query->sequence->ids;
  const auto size = static_cast<size_t>(runner_.facts().block_size);
  const auto end = static_cast<size_t>(std::min(text.certain, asked.length() - 1));
  while (text.publishes && (static_cast<size_t>(text.published) + 1) * size <= end) {
    const auto block = static_cast<size_t>(text.published);
    const PrefixNode parent =
        block == 0 ? blocks_.root(identity(*asked.query->sequence, text)) : text.node;
    text.node = blocks_.add(parent, ids.subspan(block * size, size), text.blocks[block]);
    if (text.node)
      ++text.published;
    else
      text.publishes = false;
  }
}

void DraftModel::propose(std::span<DraftQuery> queries) {
  ++calls_;
  std::vector<Asked> asked = choose(queries);
  if (asked.empty()) return;
  const bool masked = std::ranges::any_of(
      asked, [](const Asked& one) { return one.query->sequence->grammar.has_value(); });
  // A mask follows from the drafts before it; without one no step waits for the one before.
  std::vector<Drawing> in_flight = {read_texts(asked)};
  for (int64_t drafted = 1; !in_flight.empty(); ++drafted) {
    const Drawing last = in_flight.back();
    if (masked) {
      take(last);
      in_flight.pop_back();
    }
    Drawing next = continue_drafts(last, drafted);
    if (next.empty()) break;
    in_flight.push_back(std::move(next));
  }
  for (const Drawing& drawing : in_flight) take(drawing);
  blocks_.step_ended(last_step_);
  for (Asked& one : asked) {
    Text& text = *one.text;
    const std::vector<int32_t>& ids = one.query->sequence->ids;
    const std::vector<int32_t>& drafts = one.query->drafts;
    text.certain = std::ssize(text.cached) + one.rows;
    text.cached.assign(ids.begin(), ids.begin() + text.certain);
    // The last draft was drawn and not read.
    if (!drafts.empty()) text.cached.insert(text.cached.end(), drafts.begin(), drafts.end() - 1);
    publish(one);
  }
}

// -- transitions

std::string DraftedRunner::transit_draft(const RunnerTransition& transition) {
  draft_.begin(transition);
  for (;;)
    if (const std::optional<std::string> outcome = draft_.poll(kDraftWaitNs)) return *outcome;
}

void DraftedRunner::begin(const RunnerTransition& transition) {
  failure_.clear();
  undo_.reset();
  const auto* suspend = std::get_if<SuspendRunner>(&transition);
  if (suspend != nullptr || std::holds_alternative<ResumeRunner>(transition)) {
    failure_ = transit_draft(transition);
    if (!failure_.empty()) {
      failure_ = cat("the draft model: ", failure_);
      return;
    }
    if (suspend != nullptr) {
      levels_ = *suspend;
      undo_ = ResumeRunner{};
      if (levels_.levels.cache == MemoryLevel::kDrop) drafts_.forget_cache();
    } else {
      undo_ = levels_;
    }
  }
  target_.begin(transition);
}

std::optional<std::string> DraftedRunner::poll(int64_t wait_ns) {
  if (!failure_.empty()) return failure_;
  const std::optional<std::string> outcome = target_.poll(wait_ns);
  if (outcome && !outcome->empty() && undo_) transit_draft(*std::exchange(undo_, std::nullopt));
  return outcome;
}

}  // namespace megatron
