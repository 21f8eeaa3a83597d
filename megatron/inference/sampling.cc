#include "megatron/inference/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

VocabularyShards shards_of(const ProcessGroup& tp) {
  if (tp.size() == 1) return {};
  return {tp.rank(), tp.size(), [tp](const at::Tensor& t) { tp.all_reduce(t)->wait(); },
          [tp](const at::Tensor& t) { tp.all_reduce(t, ReduceOp::kMax)->wait(); },
          [tp](const at::Tensor& t) {
            std::vector<int64_t> shape = t.sizes().vec();
            shape.insert(shape.begin(), tp.size());
            at::Tensor all = at::empty(shape, t.options());
            tp.all_gather(all, t.contiguous())->wait();
            return all;
          }};
}

bool has_penalties(const SamplingParameters& p) {
  return p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0;
}

}  // namespace

void SamplingConfig::fields(FieldVisitor& v) {
  v.group("sampling");
  v.field("greedy", greedy, "always take the most likely token");
  v.field("temperature", temperature,
          "divides the logits; below 1 sharper, above 1 flatter; 0: as --greedy");
  v.field({"top_k", "--top-k --top_k"}, top_k, "sample among the k most likely tokens; 0: all");
  v.field({"top_p", "--top-p --top_p"}, top_p,
          "sample among the fewest tokens whose probabilities reach p; 0: all");
  v.field({"seed", "--seed --random-seed"}, seed, "seed of the draws");
}

void SamplingConfig::validate(Violations& violations) const {
  if (!(temperature >= 0.0 && temperature <= 100.0))
    violations.add(cat("--temperature ", temperature, " is outside [0, 100]"));
  if (top_k < 0) violations.add(cat("--top-k ", top_k, " is negative"), "0 means all tokens");
  if (!(top_p >= 0.0 && top_p <= 1.0)) violations.add(cat("--top-p ", top_p, " is outside [0, 1]"));
  if (seed <= 0) violations.add(cat("--seed ", seed, " must be positive"));
}

SamplingParameters SamplingConfig::parameters() const {
  SamplingParameters p;
  p.temperature = greedy ? 0.0 : temperature;
  p.top_k = static_cast<int32_t>(std::min<int64_t>(top_k, std::numeric_limits<int32_t>::max()));
  p.top_p = top_p == 0.0 ? 1.0 : top_p;
  p.seed = static_cast<uint64_t>(seed);
  return p;
}

LogProbabilityReport::LogProbabilityReport(std::vector<int32_t> tops) : tops_(std::move(tops)) {
  for (const int32_t top : tops_) most_ = std::max<int64_t>(most_, top);
}

at::Tensor LogProbabilityReport::pack(const LogProbabilities& values) {
  return at::cat({values.chosen.to(at::kDouble).unsqueeze(1), values.top.to(at::kDouble),
                  values.top_ids.to(at::kDouble)},
                 1)
      .view({-1});
}

PositionLogProbabilities LogProbabilityReport::read(const double* from, int64_t row,
                                                    int32_t chosen) const {
  from += row * (1 + 2 * most_);
  PositionLogProbabilities result;
  result.chosen = {chosen, static_cast<float>(from[0])};
  for (int64_t i = 1; i <= tops_[static_cast<size_t>(row)]; ++i) {
    const auto id = static_cast<int32_t>(from[most_ + i]);
    if (id < 0) break;  // fewer ids are kept
    result.top.push_back({id, static_cast<float>(from[i])});
  }
  return result;
}

DrawReport::DrawReport(std::vector<int32_t> slots, const std::vector<LogProbabilityWishes>& wishes)
    : slots_(std::move(slots)) {
  std::vector<int32_t> raw, drawn;
  for (size_t i = 0; i < wishes.size(); ++i) {
    if (wishes[i].output_top < 0) continue;
    (wishes[i].processed ? drawn_rows_ : raw_rows_).push_back(static_cast<int64_t>(i));
    (wishes[i].processed ? drawn : raw).push_back(wishes[i].output_top);
  }
  raw_ = LogProbabilityReport(std::move(raw));
  drawn_ = LogProbabilityReport(std::move(drawn));
}

int64_t DrawReport::size() const {
  return 2 * static_cast<int64_t>(slots_.size()) + raw_.size() + drawn_.size();
}

std::vector<DrawnToken> DrawReport::read(const double* from) const {
  std::vector<DrawnToken> draws;
  for (size_t i = 0; i < slots_.size(); ++i)
    draws.push_back({slots_[i], static_cast<int32_t>(from[2 * i]), from[2 * i + 1] != 0.0, {}});
  const auto add = [&](const std::vector<int64_t>& rows, const LogProbabilityReport& report) {
    for (size_t j = 0; j < rows.size(); ++j) {
      DrawnToken& drawn = draws[static_cast<size_t>(rows[j])];
      if (drawn.finite && drawn.id >= 0)
        drawn.log_probabilities = report.read(from, static_cast<int64_t>(j), drawn.id);
    }
    from += report.size();
  };
  from += 2 * slots_.size();
  add(raw_rows_, raw_);
  add(drawn_rows_, drawn_);
  return draws;
}

TokenSampler::TokenSampler(int64_t vocab_size, int64_t columns, ProcessGroup tp, at::Device device)
    : vocab_size_(vocab_size),
      first_id_(tp.rank() * columns),
      columns_(std::clamp<int64_t>(vocab_size - first_id_, 0, columns)),
      tp_(std::move(tp)),
      device_(device) {}

void TokenSampler::start(const SlotStart& start) {
  const SamplingParameters& p = start.sampling;
  Slot& slot = slots_[start.slot];
  slot = {};
  SamplingRow& how = slot.how;
  how.key = random_key(static_cast<int64_t>(p.seed), "sampling", start.choice).value;
  how.temperature = p.temperature;
  how.top_k = p.top_k;
  how.top_p = p.top_p;
  how.has_min_p = p.min_p > 0.0 ? 1 : 0;
  how.log_min_p = p.min_p > 0.0 ? std::log(p.min_p) : 0.0;
  how.repetition_penalty = p.repetition_penalty;
  how.presence_penalty = p.presence_penalty;
  how.frequency_penalty = p.frequency_penalty;
  if (has_penalties(p)) how.counts = count_ids(start);
  slot.first_end = start.prompt_length + start.min_tokens;
  slot.ends = start.ends;
  for (const int32_t id : p.forbidden) {
    slot.edit_ids.push_back(id);
    slot.edit_values.push_back(-std::numeric_limits<float>::infinity());
  }
  for (const auto& [id, bias] : p.logit_bias) {
    slot.edit_ids.push_back(id);
    slot.edit_values.push_back(bias);
  }
}

void TokenSampler::release(int32_t slot) {
  const auto found = slots_.find(slot);
  if (found == slots_.end()) return;
  if (found->second.how.counts >= 0) free_counts_.push_back(found->second.how.counts);
  slots_.erase(found);
}

int32_t TokenSampler::take_counts() {
  if (free_counts_.empty()) {
    const int64_t rows = counts_.defined() ? counts_.size(0) : 0;
    const int64_t more = std::max<int64_t>(4, rows);
    const at::Tensor added = at::zeros({more, columns_}, at::dtype(at::kInt).device(device_));
    counts_ = rows > 0 ? at::cat({counts_, added}) : added;
    for (int64_t row = rows + more; row-- > rows;)
      free_counts_.push_back(static_cast<int32_t>(row));
  }
  const int32_t row = free_counts_.back();
  free_counts_.pop_back();
  return row;
}

int32_t TokenSampler::count_ids(const SlotStart& start) {
  const int32_t row = take_counts();
  const int64_t prompt = start.prompt_length - (start.rows ? start.rows->count : 0);
  at::Tensor counts = at::zeros({columns_}, at::kInt);
  auto* count = counts.data_ptr<int32_t>();
  for (size_t i = 0; i < start.ids.size(); ++i) {
    const int64_t column = start.ids[i] - first_id_;
    if (column < 0 || column >= columns_) continue;
    if (static_cast<int64_t>(i) < prompt) {
      count[column] |= 1;
    } else {
      count[column] += 2;
    }
  }
  counts_[row].copy_(counts);
  return row;
}

SamplingBatch TokenSampler::batch_of(std::span<const Row> rows) const {
  SamplingBatch batch;
  batch.counts = counts_;
  int32_t masks = 0;
  for (const Row& row : rows) {
    const Slot& slot = slots_.at(row.slot);
    SamplingRow how = slot.how;
    how.position = row.position;
    how.first_edit = static_cast<int32_t>(batch.edit_ids.size());
    batch.edit_ids.insert(batch.edit_ids.end(), slot.edit_ids.begin(), slot.edit_ids.end());
    batch.edit_values.insert(batch.edit_values.end(), slot.edit_values.begin(),
                             slot.edit_values.end());
    if (row.position < slot.first_end) {
      batch.edit_ids.insert(batch.edit_ids.end(), slot.ends.begin(), slot.ends.end());
      batch.edit_values.resize(batch.edit_ids.size(), -std::numeric_limits<float>::infinity());
    }
    how.num_edits = static_cast<int32_t>(batch.edit_ids.size()) - how.first_edit;
    if (!row.mask.empty()) {
      MEGATRON_ASSERT(static_cast<int64_t>(row.mask.size()) == (vocab_size_ + 31) / 32,
                      row.mask.size(), " words of a mask over ", vocab_size_, " ids");
      how.mask = masks++;
      batch.masks.insert(batch.masks.end(), row.mask.begin(), row.mask.end());
    }
    batch.rows.push_back(how);
  }
  return batch;
}

std::vector<TokenSampler::DraftedCounts> TokenSampler::count_drafts(std::span<const Row> rows,
                                                                    SamplingBatch& batch) {
  std::vector<DraftedCounts> all;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool goes_on = i + 1 < rows.size() && !rows[i + 1].drafts.empty();
    SamplingRow& how = batch.rows[i];
    if (how.counts < 0 || (rows[i].drafts.empty() && !goes_on)) continue;
    if (rows[i].drafts.empty()) all.push_back({how.counts, static_cast<int64_t>(i)});
    DraftedCounts& drafted = all.back();
    drafted.drafts.assign(rows[i].drafts.begin(), rows[i].drafts.end());
    drafted.rows.push_back(take_counts());
    how.counts = drafted.rows.back();
  }
  for (const DraftedCounts& drafted : all) {
    at::Tensor counts = counts_[drafted.own].clone();
    for (size_t i = 0; i < drafted.rows.size(); ++i) {
      const int64_t column = i == 0 ? -1 : drafted.drafts[i - 1] - first_id_;
      if (column >= 0 && column < columns_) counts.narrow(0, column, 1).add_(2);
      counts_[drafted.rows[i]].copy_(counts);
    }
  }
  batch.counts = counts_;
  return all;
}

// The counts of a sequence are those of its last row that counts. Nothing waits for the device.
void TokenSampler::keep_counts(const std::vector<DraftedCounts>& drafted, const at::Tensor& ids) {
  for (const DraftedCounts& of : drafted) {
    const auto count = static_cast<int64_t>(of.drafts.size());
    const std::vector<int64_t> drafts(of.drafts.begin(), of.drafts.end());
    const std::vector<int64_t> rows(of.rows.begin(), of.rows.end());
    const at::Tensor stand =
        ids.narrow(0, of.first, count).eq(to_device(at::tensor(drafts, at::kLong), device_));
    const at::Tensor last = stand.to(at::kLong).cumprod(0).sum().view({1});
    const at::Tensor row = to_device(at::tensor(rows, at::kLong), device_).index_select(0, last);
    counts_[of.own].copy_(counts_.index_select(0, row).squeeze(0));
    free_counts_.insert(free_counts_.end(), of.rows.begin(), of.rows.end());
  }
}

TokenSampler::Draws TokenSampler::draw(const at::Tensor& logits, std::span<const Row> rows,
                                       const DrawReport& report) {
  VocabularyLogits all(logits, vocab_size_, shards_of(tp_));
  SamplingBatch batch = batch_of(rows);
  const std::vector<DraftedCounts> drafted = count_drafts(rows, batch);
  const at::Tensor ids = all.draw(batch);
  keep_counts(drafted, ids);
  VocabularyLogits::Told told = all.told(ids);
  std::vector<at::Tensor> parts = {told.numbers};
  const auto selected = [&](const std::vector<int64_t>& of) {
    return to_device(at::tensor(of, at::kLong), logits.device());
  };
  if (const LogProbabilityReport& raw = report.raw_; raw.rows() > 0) {
    const at::Tensor index = selected(report.raw_rows_);
    parts.push_back(
        raw.pack(all.at_rows(index).log_probabilities(ids.index_select(0, index), raw.most())));
  }
  if (const LogProbabilityReport& drawn = report.drawn_; drawn.rows() > 0) {
    const at::Tensor index = selected(report.drawn_rows_);
    parts.push_back(drawn.pack(
        all.at_rows(index).drawn_log_probabilities(ids.index_select(0, index), drawn.most())));
  }
  return {std::move(told.ids), parts.size() == 1 ? std::move(told.numbers) : at::cat(parts)};
}

at::Tensor TokenSampler::score(const at::Tensor& logits, const std::vector<int32_t>& targets,
                               int64_t top) const {
  const std::vector<int64_t> ids(targets.begin(), targets.end());
  return LogProbabilityReport::pack(
      VocabularyLogits(logits, vocab_size_, shards_of(tp_))
          .log_probabilities(to_device(at::tensor(ids, at::kLong), logits.device()), top));
}

}  // namespace megatron
