#include "megatron/transformer/moe/dispatch_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// How much of [first, first + length) lies in [begin, end).
int64_t overlap(int64_t first, int64_t length, int64_t begin, int64_t end) {
  return std::max<int64_t>(0, std::min(first + length, end) - std::max(first, begin));
}

}  // namespace

DispatchPlan::DispatchPlan(const ExpertRanks& ranks, int64_t num_experts,
                           std::vector<int64_t> counts, int64_t max_rows)
    : ranks_(ranks), num_experts_(num_experts), counts_(std::move(counts)), max_rows_(max_rows) {
  MEGATRON_ASSERT(num_experts % ranks.ep == 0, num_experts, " experts on ", ranks.ep, " ranks");
  MEGATRON_ASSERT(static_cast<int64_t>(counts_.size()) == ranks.size() * num_experts,
                  counts_.size(), " counts of ", num_experts, " experts and ", ranks.size(),
                  " sources");
  if (max_rows_ <= 0) return;
  for (int64_t part = 0; part < ranks_.ep; ++part)
    rounds_ = std::max(rounds_, (rows_for(part) + max_rows_ - 1) / max_rows_);
}

int64_t DispatchPlan::rows_of(int64_t source) const {
  const auto first = counts_.begin() + source * num_experts_;
  return std::accumulate(first, first + num_experts_, int64_t{0});
}

int64_t DispatchPlan::rows_for(int64_t part) const {
  int64_t rows = 0;
  for (int64_t source = 0; source < ranks_.size(); ++source)
    for (int64_t j = 0; j < experts_per_rank(); ++j)
      rows += count(source, part * experts_per_rank() + j);
  return rows;
}

int64_t DispatchPlan::most_rows() const {
  int64_t most = 0;
  for (int64_t part = 0; part < ranks_.ep; ++part)
    most = std::max(most, max_rows_ > 0 ? std::min(max_rows_, rows_for(part)) : rows_for(part));
  for (int64_t source = 0; source < ranks_.size(); ++source)
    most = std::max(most, ranks_.etp * rows_of(source));
  return most;
}

int64_t DispatchPlan::end_of(int64_t round) const {
  return max_rows_ > 0 ? begin_of(round + 1) : std::numeric_limits<int64_t>::max();
}

DispatchRound DispatchPlan::round(int64_t number) const {
  const int64_t begin = begin_of(number), end = end_of(number);
  DispatchRound round;
  round.number = number;
  round.first_row = begin;
  add_sent(begin, end, round);
  add_received(begin, end, round);
  return round;
}

template <class Run>
void DispatchPlan::for_each_run(int64_t part, int64_t begin, int64_t end, const Run& run) const {
  int64_t at = 0, row = 0;
  for (int64_t j = 0; j < experts_per_rank(); ++j) {
    for (int64_t source = 0; source < ranks_.size(); ++source) {
      const int64_t rows = count(source, part * experts_per_rank() + j);
      const int64_t taken = overlap(at, rows, begin, end);
      if (taken > 0) run(source, row, taken);
      at += rows;
      row += taken;
    }
  }
}

DispatchRuns DispatchPlan::runs(int64_t number) const {
  const int64_t begin = begin_of(number), end = end_of(number), sources = ranks_.size();
  DispatchRuns runs;
  // Of each source: what it sends, and where of that its rows for this rank's experts start.
  std::vector<int64_t> sent(sources, 0), place(sources, 0);
  for (int64_t part = 0; part < ranks_.ep; ++part) {
    if (part == ranks_.ep_rank) place = sent;
    for_each_run(part, begin, end, [&](int64_t source, int64_t row, int64_t rows) {
      if (source == ranks_.rank())
        for (int64_t a = 0; a < ranks_.etp; ++a)
          runs.to_experts.push_back(
              {static_cast<int>(a + ranks_.etp * part), sent[source], row, rows});
      sent[source] += rows;
    });
  }
  for_each_run(ranks_.ep_rank, begin, end, [&](int64_t source, int64_t row, int64_t rows) {
    const int64_t first = ranks_.etp_rank * sent[source] + place[source];
    runs.back.push_back({static_cast<int>(source), row, first, rows});
    place[source] += rows;
  });
  return runs;
}

// The rows of one source for one part of the experts are contiguous in its source order, and so are
// those of them that a piece of the part's order holds.
void DispatchPlan::add_sent(int64_t begin, int64_t end, DispatchRound& round) const {
  int64_t own_first = 0;  // of this part, in the source order
  for (int64_t part = 0; part < ranks_.ep; ++part) {
    int64_t at = 0, before = 0, sent = 0, own = 0;
    for (int64_t j = 0; j < experts_per_rank(); ++j) {
      for (int64_t source = 0; source < ranks_.size(); ++source) {
        const int64_t rows = count(source, part * experts_per_rank() + j);
        if (source == ranks_.rank()) {
          before += overlap(at, rows, 0, begin);
          sent += overlap(at, rows, begin, end);
          own += rows;
        }
        at += rows;
      }
    }
    round.sent.push_back(sent);
    round.sent_begin.push_back(own_first + before);
    own_first += own;
  }
}

void DispatchPlan::add_received(int64_t begin, int64_t end, DispatchRound& round) const {
  const int64_t experts = experts_per_rank(), sources = ranks_.size();
  // [E/e, e x]: rows of this round
  std::vector<int64_t> taken(experts * sources), of_source(sources, 0);
  round.expert_rows.assign(experts, 0);
  round.rows_before.assign(experts, 0);
  int64_t at = 0;
  for (int64_t j = 0; j < experts; ++j) {
    for (int64_t source = 0; source < sources; ++source) {
      const int64_t rows = count(source, ranks_.ep_rank * experts + j);
      const int64_t part = overlap(at, rows, begin, end);
      round.rows_before[j] += overlap(at, rows, 0, begin);
      at += rows;
      taken[j * sources + source] = part;
      of_source[source] += part;
      round.expert_rows[j] += part;
      round.rows += part;
    }
  }
  // Where each source's rows start in what arrives
  std::vector<int64_t> arrival(sources);
  int64_t arrived = 0;
  for (int64_t a = 0; a < ranks_.etp; ++a) {
    const int64_t before = arrived;
    for (int64_t p = 0; p < ranks_.ep; ++p) {
      const int64_t source = a + ranks_.etp * p;
      arrival[source] = arrived;
      arrived += of_source[source];
      if (a == ranks_.etp_rank) round.received.push_back(of_source[source]);
    }
    round.gathered.push_back(arrived - before);
  }
  int64_t row = 0;
  for (int64_t run = 0; run < experts * sources; ++run) {
    if (taken[run] == 0) continue;
    int64_t& from = arrival[run % sources];
    round.run_rows.push_back(taken[run]);
    round.run_shift.push_back(from - row);
    from += taken[run];
    row += taken[run];
  }
}

}  // namespace megatron
