// Which rows go where between the ranks that hold one set of experts, as plain numbers: a function
// of how many rows each of them has for each expert.
//
// Experts are divided evenly over e expert ranks, and an expert's matrices over x expert-tensor
// ranks, which see the same rows. Sources are numbered with the expert-tensor rank fastest.
//
// The order of an expert rank's rows: by expert, then by source, then by the source's token,
// whatever transports them. With a bound on the rows that a rank holds at a time, they are taken in
// rounds: each round is the next piece of that order.
#pragma once

#include <cstdint>
#include <vector>

namespace megatron {

// A rank's position among them.
struct ExpertRanks {
  int64_t ep = 1, etp = 1;  // e and x
  int64_t ep_rank = 0, etp_rank = 0;
  int64_t size() const { return ep * etp; }
  int64_t rank() const { return etp_rank + etp * ep_rank; }
};

// One round as one rank sees it. Its source order is its own rows by expert, then by token.
struct DispatchRound {
  int64_t number = 0;
  // [E/e]: rows of each expert of this rank, in this round and in all before it
  std::vector<int64_t> expert_rows, rows_before;
  int64_t rows = 0;       // their sum
  int64_t first_row = 0;  // of this rank's order
  // [e] rows that this rank sends to the ranks of each part of the experts, a contiguous piece of
  // its source order that starts at sent_begin
  std::vector<int64_t> sent, sent_begin;
  // [e] rows that this rank receives from each source with its own expert-tensor rank
  std::vector<int64_t> received;
  // [x] the same received by each expert-tensor rank: together `rows`
  std::vector<int64_t> gathered;
  // Row i of this round's order is row i + shift of what arrived: by expert-tensor rank, then by
  // expert rank of the source, each in its source order. One shift for each run of rows.
  std::vector<int64_t> run_rows, run_shift;
};

// Rows that lie together at their sender and at their receiver.
struct SentRows {
  int rank = 0;              // the receiver, as numbered above
  int64_t from = 0, to = 0;  // first row, at the sender and at the receiver
  int64_t rows = 0;
};

// What one rank sends in a round if rows go straight to their places.
struct DispatchRuns {
  // From its source order, of which only what is sent counts, to the order of the experts' ranks.
  std::vector<SentRows> to_experts;
  // From the order of its experts to the source orders, with such rows of each expert-tensor rank
  // after those of the one before.
  std::vector<SentRows> back;
};

class DispatchPlan {
 public:
  // `counts` [e x, E]: rows of each source for each expert. `max_rows`: the most rows of one round
  // on a rank; 0: no bound.
  DispatchPlan(const ExpertRanks& ranks, int64_t num_experts, std::vector<int64_t> counts,
               int64_t max_rows);

  // The same on all ranks, at least 1.
  int64_t rounds() const { return rounds_; }
  DispatchRound round(int64_t number) const;
  DispatchRuns runs(int64_t number) const;
  int64_t own_rows() const { return rows_of(ranks_.rank()); }  // in this rank's source order
  // An upper bound of the rows that a rank gets in a round: of its experts, or back from all
  // expert-tensor ranks.
  int64_t most_rows() const;

 private:
  int64_t count(int64_t source, int64_t expert) const {
    return counts_[source * num_experts_ + expert];
  }
  int64_t experts_per_rank() const { return num_experts_ / ranks_.ep; }
  int64_t begin_of(int64_t round) const { return max_rows_ > 0 ? round * max_rows_ : 0; }
  int64_t end_of(int64_t round) const;
  int64_t rows_of(int64_t source) const;
  int64_t rows_for(int64_t part) const;
  // Calls run(source, row, rows) for what each source has for each expert of a part in [begin, end)
  // of that part's order, in this order; `row` counts from `begin`.
  template <class Run>
  void for_each_run(int64_t part, int64_t begin, int64_t end, const Run& run) const;
  void add_sent(int64_t begin, int64_t end, DispatchRound& round) const;
  void add_received(int64_t begin, int64_t end, DispatchRound& round) const;

  const ExpertRanks ranks_;
  const int64_t num_experts_;
  const std::vector<int64_t> counts_;
  const int64_t max_rows_;
  int64_t rounds_ = 1;
};

}  // namespace megatron
