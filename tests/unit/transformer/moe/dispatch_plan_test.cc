// Plans of exchanges against rows that are moved one by one.
#include "megatron/transformer/moe/dispatch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

#include "megatron/base/check.h"

namespace megatron {
namespace {

struct PlannedRow {
  int64_t expert, source, index;  // the index counts the source's rows of this expert
  auto operator<=>(const PlannedRow&) const = default;
};
using PlannedRows = std::vector<PlannedRow>;

PlannedRows rows_of_source(const std::vector<int64_t>& counts, int64_t experts, int64_t source) {
  PlannedRows rows;
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t i = 0; i < counts[source * experts + e]; ++i) rows.push_back({e, source, i});
  return rows;
}

// What every rank holds after a round, if all do what their plans say.
std::vector<PlannedRows> move_rows(const ExpertRanks& grid, const std::vector<DispatchRound>& plans,
                                   const std::vector<PlannedRows>& sources) {
  std::vector<PlannedRows> received(grid.size());  // by expert rank of the source
  for (int64_t rank = 0; rank < grid.size(); ++rank) {
    const int64_t part = rank / grid.etp, place = rank % grid.etp;
    for (int64_t p = 0; p < grid.ep; ++p) {
      const int64_t source = place + grid.etp * p;
      const DispatchRound& plan = plans[source];
      EXPECT_EQ(plan.sent[part], plans[rank].received[p]);
      const auto first = sources[source].begin() + plan.sent_begin[part];
      received[rank].insert(received[rank].end(), first, first + plan.sent[part]);
    }
  }
  std::vector<PlannedRows> held(grid.size());
  for (int64_t rank = 0; rank < grid.size(); ++rank) {
    PlannedRows all;
    for (int64_t a = 0; a < grid.etp; ++a) {
      const PlannedRows& of_peer = received[rank / grid.etp * grid.etp + a];
      EXPECT_EQ(static_cast<int64_t>(of_peer.size()), plans[rank].gathered[a]);
      all.insert(all.end(), of_peer.begin(), of_peer.end());
    }
    int64_t row = 0;
    for (size_t run = 0; run < plans[rank].run_rows.size(); ++run)
      for (int64_t i = 0; i < plans[rank].run_rows[run]; ++i, ++row)
        held[rank].push_back(all.at(row + plans[rank].run_shift[run]));
    EXPECT_EQ(row, plans[rank].rows);
  }
  return held;
}

// All rounds together give every expert rank its rows by expert, source and token.
void expect_canonical(const ExpertRanks& grid, int64_t experts, const std::vector<int64_t>& counts,
                      int64_t max_rows) {
  std::vector<DispatchPlan> plans;
  std::vector<PlannedRows> sources, expected(grid.size()), held(grid.size());
  for (int64_t rank = 0; rank < grid.size(); ++rank) {
    const ExpertRanks here{grid.ep, grid.etp, rank / grid.etp, rank % grid.etp};
    plans.emplace_back(here, experts, counts, max_rows);
    sources.push_back(rows_of_source(counts, experts, rank));
    EXPECT_EQ(plans.back().own_rows(), static_cast<int64_t>(sources.back().size()));
    EXPECT_EQ(plans.back().rounds(), plans[0].rounds());
  }
  for (int64_t rank = 0; rank < grid.size(); ++rank) {
    for (const PlannedRows& rows : sources)
      for (const PlannedRow& row : rows)
        if (row.expert / (experts / grid.ep) == rank / grid.etp) expected[rank].push_back(row);
    std::sort(expected[rank].begin(), expected[rank].end());
  }
  int64_t most = 0;
  for (const PlannedRows& rows : expected) most = std::max<int64_t>(most, rows.size());
  EXPECT_EQ(plans[0].rounds(),
            max_rows == 0 ? 1 : std::max<int64_t>(1, (most + max_rows - 1) / max_rows));
  for (int64_t number = 0; number < plans[0].rounds(); ++number) {
    std::vector<DispatchRound> round;
    for (const DispatchPlan& plan : plans) round.push_back(plan.round(number));
    const std::vector<PlannedRows> now = move_rows(grid, round, sources);
    for (int64_t rank = 0; rank < grid.size(); ++rank) {
      EXPECT_TRUE(max_rows == 0 || round[rank].rows <= max_rows);
      EXPECT_TRUE(now[rank].empty() ||
                  round[rank].first_row == static_cast<int64_t>(held[rank].size()));
      std::vector<int64_t> of_expert(experts / grid.ep), before(experts / grid.ep);
      for (const PlannedRow& row : held[rank]) ++before[row.expert % (experts / grid.ep)];
      EXPECT_EQ(round[rank].rows_before, before);
      for (const PlannedRow& row : now[rank]) ++of_expert[row.expert % (experts / grid.ep)];
      EXPECT_EQ(round[rank].expert_rows, of_expert);
      held[rank].insert(held[rank].end(), now[rank].begin(), now[rank].end());
    }
  }
  EXPECT_EQ(held, expected);
}

TEST(DispatchPlan, GivesEveryExpertItsRowsInOrder) {
  std::mt19937 random(1);
  for (const auto& [ep, etp] : {std::pair{1, 2}, {2, 1}, {2, 2}, {4, 1}, {3, 2}}) {
    const int64_t experts = 6 * 4;
    for (int trial = 0; trial < 8; ++trial) {
      std::vector<int64_t> counts(ep * etp * experts);
      for (int64_t& count : counts)
        count = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 5);
      if (trial == 0) std::fill(counts.begin(), counts.end(), 0);
      if (trial == 1) std::fill(counts.begin() + experts, counts.end(), 0);
      for (const int64_t max_rows : {0, 1, 7, 40, 1000}) {
        SCOPED_TRACE(cat("ep ", ep, " etp ", etp, " trial ", trial, " rows ", max_rows));
        expect_canonical({ep, etp, 0, 0}, experts, counts, max_rows);
      }
    }
  }
}

}  // namespace
}  // namespace megatron
