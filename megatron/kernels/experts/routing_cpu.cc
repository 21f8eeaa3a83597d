#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/routing_math.h"
#include "megatron/kernels/experts/routing.h"

namespace megatron {
namespace {

// Sum of f(i) over [0, n) in the order in which the lanes of a warp add it.
template <class Acc, class F>
Acc sum_as_warp(int64_t n, const F& f) {
  Acc lanes[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int64_t j = 0; j < 32; ++j) lanes[j] += f(i + j);
  for (int64_t j = 0; i + j < n; ++j) lanes[j] += f(i + j);
  for (int64_t offset = 16; offset > 0; offset /= 2)
    for (int64_t j = 0; j < offset && offset < n; ++j) lanes[j] += lanes[j + offset];
  return lanes[0];
}

template <class Acc, class F>
Acc max_of(int64_t n, const F& f) {
  Acc best = -std::numeric_limits<Acc>::infinity();
  for (int64_t i = 0; i < n; ++i) {
    const Acc x = f(i);
    best = x > best ? x : best;
  }
  return best;
}

template <class Acc>
struct Softmax {
  Acc max = 0, sum = 1;
  Acc of(Acc logit) const { return fast_exp(logit - max) / sum; }
  Acc lse() const { return max + log_of_sum(sum); }
};

template <class Acc, class F>
Softmax<Acc> softmax_over(int64_t n, const F& logit) {
  Softmax<Acc> softmax;
  softmax.max = max_of<Acc>(n, logit);
  softmax.sum = sum_as_warp<Acc>(n, [&](int64_t i) { return fast_exp(logit(i) - softmax.max); });
  return softmax;
}

using Indices = std::vector<int32_t>;

// The k highest of n scores, in descending order.
template <class Acc>
void choose(const Acc* scores, int64_t n, int64_t k, int32_t* chosen) {
  using Key = decltype(order_key(Acc()));
  thread_local std::vector<Key> keys;
  if (k == 0) return;
  keys.resize(static_cast<size_t>(k));
  int64_t count = 0;
  for (int64_t e = 0; e < n; ++e) {
    const Key key = order_key(scores[e]);
    if (count == k && key <= keys[k - 1]) continue;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && keys[at - 1] < key; --at) {
      keys[at] = keys[at - 1];
      chosen[at] = chosen[at - 1];
    }
    keys[at] = key;
    chosen[at] = static_cast<int32_t>(e);
  }
}

// Memory of a thread for one row.
template <class Acc>
struct RowMemory {
  explicit RowMemory(const RouterRows& rows)
      : scores(rows.experts),
        selection(rows.experts),
        groups(rows.options.num_groups),
        chosen(rows.options.topk),
        others(std::max(rows.options.topk, rows.options.num_groups)) {}
  std::vector<Acc> scores, selection, groups;
  Indices chosen, others;
};

// Scores of experts outside the best groups become -inf.
template <class Acc>
void mask_groups(const RoutingOptions& options, RowMemory<Acc>& memory) {
  std::vector<Acc>& scores = memory.selection;
  const int64_t size = static_cast<int64_t>(scores.size()) / options.num_groups;
  const int64_t summed = scores_of_group(options);
  for (int64_t g = 0; g < options.num_groups; ++g) {
    choose(scores.data() + g * size, size, summed, memory.others.data());
    Acc sum = 0;
    for (int64_t j = 0; j < summed; ++j) sum += scores[g * size + memory.others[j]];
    memory.groups[g] = sum;
  }
  choose(memory.groups.data(), options.num_groups, options.group_topk, memory.others.data());
  std::fill(memory.groups.begin(), memory.groups.end(), Acc(0));
  for (int64_t j = 0; j < options.group_topk; ++j) memory.groups[memory.others[j]] = 1;
  for (int64_t g = 0; g < options.num_groups; ++g)
    if (memory.groups[g] == Acc(0))
      std::fill_n(scores.begin() + g * size, size, -std::numeric_limits<Acc>::infinity());
}

// One row of the forward.
template <class Acc>
class ForwardRow {
 public:
  ForwardRow(const RouterRows& rows, const RouterForward& args, RowMemory<Acc>& memory)
      : rows_(rows), args_(args), memory_(memory), n_(rows.experts), k_(rows.options.topk) {
    is_softmax_ = rows.options.score == RouterScore::kSoftmax;
    makes_ = args.choices != nullptr && !args.choices_given;
    needs_softmax_ = is_softmax_ ? rows.options.pre_softmax || args.sums != nullptr : args.squares;
  }

  void run(int64_t i, int32_t* counts, double* sums) {
    logits_ = static_cast<const Acc*>(rows_.logits) + i * n_;
    if (needs_softmax_) softmax_ = softmax_over<Acc>(n_, [&](int64_t e) { return logits_[e]; });
    if (!is_softmax_)
      for (int64_t e = 0; e < n_; ++e)
        memory_.scores[e] = expert_score(logits_[e], rows_.options.score);
    if (args_.choices != nullptr) {
      int32_t* choices = args_.choices + i * k_;
      if (makes_) choose_experts(choices);
      std::copy_n(choices, k_, memory_.chosen.data());
      if (args_.weights != nullptr) weigh(static_cast<Acc*>(args_.weights) + i * k_);
    }
    if (rows_.padding != nullptr && rows_.padding[i]) return;
    if (counts != nullptr) count(counts);
    if (sums != nullptr) add(sums);
  }

 private:
  void choose_experts(int32_t* choices) {
    const auto* bias = static_cast<const Acc*>(args_.bias);
    const bool grouped = rows_.options.num_groups > 0;
    const Acc* base = is_softmax_ ? logits_ : memory_.scores.data();
    if (is_softmax_ && rows_.options.pre_softmax) {
      for (int64_t e = 0; e < n_; ++e) memory_.selection[e] = softmax_.of(logits_[e]);
    } else if (bias != nullptr || grouped) {
      for (int64_t e = 0; e < n_; ++e)
        memory_.selection[e] = bias != nullptr ? base[e] + bias[e] : base[e];
    } else {
      return choose(base, n_, k_, choices);
    }
    if (grouped) mask_groups(rows_.options, memory_);
    choose(memory_.selection.data(), n_, k_, choices);
  }

  void weigh(Acc* weights) const {
    const RoutingOptions& options = rows_.options;
    const Acc scale = weight_scale<Acc>(options);
    const auto logit = [&](int64_t j) { return logits_[memory_.chosen[j]]; };
    const auto score = [&](int64_t j) { return memory_.scores[memory_.chosen[j]]; };
    if (!is_softmax_) {
      const Acc sum = k_ == 1 ? Acc(1) : with_smallest(sum_as_warp<Acc>(k_, score));
      for (int64_t j = 0; j < k_; ++j) weights[j] = score(j) / sum * scale;
      return;
    }
    const Softmax<Acc> softmax = options.pre_softmax ? softmax_ : softmax_over<Acc>(k_, logit);
    for (int64_t j = 0; j < k_; ++j) weights[j] = softmax.of(logit(j)) * scale;
  }

  void count(int32_t* counts) {
    const int32_t* best = memory_.chosen.data();
    if (!chooses_by_share(rows_, args_)) {
      choose(is_softmax_ ? logits_ : memory_.scores.data(), n_, k_, memory_.others.data());
      best = memory_.others.data();
    }
    for (int64_t j = 0; j < k_; ++j) ++counts[best[j]];
  }

  void add(double* sums) const {
    if (is_softmax_) {
      for (int64_t e = 0; e < n_; ++e) sums[e] += softmax_.of(logits_[e]);
    } else {
      const Acc* scores = memory_.scores.data();
      const Acc sum = with_smallest(sum_as_warp<Acc>(n_, [=](int64_t e) { return scores[e]; }));
      for (int64_t e = 0; e < n_; ++e) sums[e] += scores[e] / sum;
    }
    if (args_.squares) sums[n_ + kSumOfSquares] += softmax_.lse() * softmax_.lse();
    sums[n_ + kSumOfRows] += 1;
  }

  const RouterRows& rows_;
  const RouterForward& args_;
  RowMemory<Acc>& memory_;
  const int64_t n_, k_;
  bool is_softmax_, makes_, needs_softmax_;
  const Acc* logits_ = nullptr;
  Softmax<Acc> softmax_;
};

template <class Acc>
void forward_units(const RouterRows& rows, const RouterForward& args, int64_t begin, int64_t end) {
  const int64_t n = rows.experts, b = rows.sequences, positions = rows.rows / b;
  RowMemory<Acc> memory(rows);
  ForwardRow<Acc> row(rows, args, memory);
  Indices counts(args.counts != nullptr ? n : 0);
  std::vector<double> sums(args.sums != nullptr ? n + kMoreSums : 0);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t part = unit / b, q = unit % b;
    std::fill(counts.begin(), counts.end(), 0);
    std::fill(sums.begin(), sums.end(), 0.0);
    const int64_t last = positions * (part + 1) / args.parts;
    for (int64_t t = positions * part / args.parts; t < last; ++t)
      row.run(t * b + q, args.counts != nullptr ? counts.data() : nullptr,
              args.sums != nullptr ? sums.data() : nullptr);
    for (size_t e = 0; e < counts.size(); ++e)
      if (counts[e] != 0)
        std::atomic_ref<int32_t>(args.counts[q * n + static_cast<int64_t>(e)]) += counts[e];
    for (size_t c = 0; c < sums.size(); ++c)
      args.sums[(q * (n + kMoreSums) + static_cast<int64_t>(c)) * args.parts + part] = sums[c];
  }
}

// phi of the sums of `rows` rows of counts.
template <class Count>
void assign_shares(const Count* counts, int64_t rows, int64_t experts, int64_t k, double* shares) {
  int64_t total = 0;
  for (int64_t i = 0; i < rows * experts; ++i) total += counts[i];
  for (int64_t e = 0; e < experts; ++e) {
    int64_t sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += counts[r * experts + e];
    shares[e] = static_cast<double>(sum) * static_cast<double>(k) /
                static_cast<double>(std::max<int64_t>(total, 1));
  }
}

// The backward of one row.
template <class Acc>
class BackwardRow {
 public:
  BackwardRow(const RouterRows& rows, const RouterBackward& args)
      : rows_(rows),
        args_(args),
        n_(rows.experts),
        k_(rows.options.topk),
        is_softmax_(rows.options.score == RouterScore::kSoftmax),
        before_(is_softmax_ && rows.options.pre_softmax),
        weighs_(args.dweights != nullptr),
        dshare_(n_),
        share_(n_),
        dscore_(n_) {
    for (int i = 0; i < kBalanceTerms; ++i)
      grad_[i] = args.dlosses[i] == nullptr ? 0.0 : *args.dlosses[i] * args.balance.coefficient[i];
    const double scale = static_cast<double>(n_) / static_cast<double>(k_);
    for (int i = 0; i < kZTerm; ++i) grad_[i] *= scale;
    balances_ = args.dlosses[kMicroTerm] != nullptr || args.dlosses[kSequenceTerm] != nullptr ||
                args.dlosses[kGlobalTerm] != nullptr;
    squares_ = args.dlosses[kZTerm] != nullptr;
  }

  void run(int64_t i) {
    const Acc* logits = static_cast<const Acc*>(rows_.logits) + i * n_;
    Acc* out = static_cast<Acc*>(args_.dlogits) + i * n_;
    const int64_t q = i % rows_.sequences;
    const bool counted = rows_.padding == nullptr || !rows_.padding[i];
    const bool balances = balances_ && counted, squares = squares_ && counted;
    Softmax<Acc> softmax;
    if (squares || (is_softmax_ && (balances || before_)))
      softmax = softmax_over<Acc>(n_, [&](int64_t e) { return logits[e]; });
    std::fill(dscore_.begin(), dscore_.end(), Acc(0));
    if (weighs_) weights_backward(i, logits);
    std::fill(dshare_.begin(), dshare_.end(), Acc(0));
    if (balances) share_gradients(q);
    if (is_softmax_) {
      if (balances || before_) add_softmax(logits, softmax);
      for (int64_t e = 0; e < n_; ++e) out[e] = dscore_[e];
    } else {
      scores_backward(logits, balances, out);
    }
    if (!squares) return;
    const Acc factor =
        static_cast<Acc>(2 * grad_[kZTerm] * args_.balance.of_sequence[q]) * softmax.lse();
    for (int64_t e = 0; e < n_; ++e) out[e] += factor * softmax.of(logits[e]);
  }

 private:
  // dscore: of the chosen logits, shares (pre_softmax) or scores.
  void weights_backward(int64_t i, const Acc* logits) {
    const int32_t* choices = args_.choices + i * k_;
    const Acc* dw = static_cast<const Acc*>(args_.dweights) + i * k_;
    const Acc scale = weight_scale<Acc>(rows_.options);
    const auto logit = [&](int64_t j) { return logits[choices[j]]; };
    if (before_) {
      for (int64_t j = 0; j < k_; ++j) dscore_[choices[j]] = scale * dw[j];
    } else if (is_softmax_) {
      const Softmax<Acc> softmax = softmax_over<Acc>(k_, logit);
      const Acc mean =
          sum_as_warp<Acc>(k_, [&](int64_t j) { return softmax.of(logit(j)) * dw[j]; });
      for (int64_t j = 0; j < k_; ++j)
        dscore_[choices[j]] = scale * softmax.of(logit(j)) * (dw[j] - mean);
    } else if (k_ == 1) {
      dscore_[choices[0]] = scale * dw[0];
    } else {
      const auto score = [&](int64_t j) { return expert_score(logit(j), rows_.options.score); };
      const Acc sum = with_smallest(sum_as_warp<Acc>(k_, score));
      const Acc mean = sum_as_warp<Acc>(k_, [&](int64_t j) { return score(j) * dw[j]; }) / sum;
      for (int64_t j = 0; j < k_; ++j) dscore_[choices[j]] = scale * (dw[j] - mean) / sum;
    }
  }

  void share_gradients(int64_t q) {
    const double weight = args_.balance.of_sequence[q];
    const double* of_sequence = args_.shares + q * n_;
    const double* micro = args_.shares + args_.balance.sequences * n_;
    for (int64_t e = 0; e < n_; ++e)
      dshare_[e] = static_cast<Acc>(weight * (grad_[kMicroTerm] * micro[e] +
                                              grad_[kSequenceTerm] * of_sequence[e] +
                                              grad_[kGlobalTerm] * micro[n_ + e]));
  }

  void add_softmax(const Acc* logits, const Softmax<Acc>& softmax) {
    for (int64_t e = 0; e < n_; ++e) {
      share_[e] = softmax.of(logits[e]);
      if (before_) dshare_[e] += dscore_[e];
    }
    const Acc mean = sum_as_warp<Acc>(n_, [&](int64_t e) { return share_[e] * dshare_[e]; });
    for (int64_t e = 0; e < n_; ++e) {
      const Acc own = share_[e] * (dshare_[e] - mean);
      dscore_[e] = before_ ? own : dscore_[e] + own;
    }
  }

  void scores_backward(const Acc* logits, bool balances, Acc* out) {
    const RouterScore kind = rows_.options.score;
    for (int64_t e = 0; e < n_; ++e) share_[e] = expert_score(logits[e], kind);
    if (balances) {
      const Acc sum = with_smallest(sum_as_warp<Acc>(n_, [&](int64_t e) { return share_[e]; }));
      const Acc mean =
          sum_as_warp<Acc>(n_, [&](int64_t e) { return share_[e] * dshare_[e]; }) / sum;
      for (int64_t e = 0; e < n_; ++e) dscore_[e] += (dshare_[e] - mean) / sum;
    }
    for (int64_t e = 0; e < n_; ++e) out[e] = dscore_[e] * score_slope(logits[e], share_[e], kind);
  }

  const RouterRows& rows_;
  const RouterBackward& args_;
  const int64_t n_, k_;
  const bool is_softmax_, before_, weighs_;
  std::vector<Acc> dshare_, share_, dscore_;
  double grad_[kBalanceTerms];
  bool balances_, squares_;
};

}  // namespace

void router_forward_cpu(const RouterRows& rows, const RouterForward& args, int64_t begin,
                        int64_t end) {
  with_accumulator(rows.dtype,
                   [&](auto acc) { forward_units<decltype(acc)>(rows, args, begin, end); });
}

void balance_losses_cpu(const BalanceLosses& losses, const BalanceForward& args) {
  const int64_t n = losses.experts, b = losses.sequences, columns = n + kMoreSums;
  const auto sum_of = [&](int64_t q, int64_t c) {
    const double* from = args.sums + (q * columns + c) * args.parts;
    double sum = 0;
    for (int64_t part = 0; part < args.parts; ++part) sum += from[part];
    return sum * losses.of_sequence[q];
  };
  double* micro = args.shares + b * n;
  std::fill_n(args.shares, (b + 2) * n, 0.0);
  if (args.counts != nullptr) {
    for (int64_t q = 0; q < b; ++q)
      assign_shares(args.counts + q * n, 1, n, losses.topk, args.shares + q * n);
    assign_shares(args.counts, b, n, losses.topk, micro);
  }
  if (args.step_counts != nullptr) assign_shares(args.step_counts, 1, n, losses.topk, micro + n);
  double total[kBalanceTerms] = {}, rows = 0;
  for (int64_t q = 0; q < b; ++q) {
    for (int64_t e = 0; e < n && args.counts != nullptr; ++e) {
      const double sum = sum_of(q, e);
      total[kMicroTerm] += sum * micro[e];
      total[kSequenceTerm] += sum * args.shares[q * n + e];
      if (args.step_counts != nullptr) total[kGlobalTerm] += sum * micro[n + e];
    }
    total[kZTerm] += sum_of(q, n + kSumOfSquares);
    rows += sum_of(q, n + kSumOfRows);
  }
  const double scale = static_cast<double>(n) / static_cast<double>(losses.topk);
  for (int i = 0; i < kBalanceTerms; ++i) {
    args.weights[i] = losses.coefficient[i] * rows;
    if (args.losses[i] != nullptr)
      *args.losses[i] = losses.coefficient[i] * (i == kZTerm ? 1.0 : scale) * total[i];
  }
}

void router_backward_cpu(const RouterRows& rows, const RouterBackward& args, int64_t begin,
                         int64_t end) {
  with_accumulator(rows.dtype, [&](auto acc) {
    BackwardRow<decltype(acc)> row(rows, args);
    for (int64_t i = begin; i < end; ++i) row.run(i);
  });
}

void count_assignments_cpu(const AssignmentCounts& args) {
  for (int64_t i = 0; i < args.rows; ++i) {
    if (args.padding != nullptr && args.padding[i]) continue;
    int32_t* counts = args.counts + i % args.sequences * args.experts;
    for (int64_t at = i * args.topk; at < (i + 1) * args.topk; ++at)
      if (args.choices[at] >= 0 && (args.kept == nullptr || args.kept[at]))
        ++counts[args.choices[at]];
  }
}

}  // namespace megatron
