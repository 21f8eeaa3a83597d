#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/sampling_math.h"

namespace megatron {
namespace {

constexpr int64_t kRun = 512;  // ids computed between two comparisons; a multiple of 64

template <class Acc>
void edit(const SamplingLogits& a, const SamplingRow& how, Acc* x) {
  for (int32_t i = how.first_edit; i < how.first_edit + how.num_edits; ++i) {
    const int64_t column = a.edit_ids[i] - a.first_id;
    if (column >= 0 && column < a.columns) x[column] += static_cast<Acc>(a.edit_values[i]);
  }
}

template <class Acc>
void penalise_and_mask(const SamplingLogits& a, const SamplingRow& how, Acc* x) {
  if (how.counts >= 0) {
    const int32_t* counts = a.counts + how.counts * a.columns;
    for (int64_t i = 0; i < a.columns; ++i)
      if (counts[i] != 0) x[i] = penalised(x[i], how, counts[i]);
  }
  for (int64_t i = 0; how.mask >= 0 && i < a.columns; ++i)
    if (is_masked(a, how, a.first_id + i)) x[i] = -std::numeric_limits<Acc>::infinity();
}

template <class Acc>
Acc largest_of(const Acc* x, int64_t n) {
  Acc lanes[16];
  std::fill_n(lanes, 16, -std::numeric_limits<Acc>::infinity());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int64_t j = 0; j < 16; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  return *std::max_element(lanes, lanes + 16);
}

template <class Acc>
bool all_below_infinity(const Acc* x, int64_t n) {
  bool all = true;
  for (int64_t i = 0; i < n; ++i) all &= x[i] < std::numeric_limits<Acc>::infinity();
  return all;
}

template <class Acc>
void process_row(const SamplingLogits& a, double* extremes, int64_t row) {
  Acc* x = static_cast<Acc*>(a.logits) + row * a.stride;
  extremes[row] = all_below_infinity(x, a.columns) ? 0.0 : 1.0;
  const Acc before = largest_of(x, a.columns);
  extremes[a.rows + row] = static_cast<double>(before);
  extremes[2 * a.rows + row] = static_cast<double>(before);
  if (a.row == nullptr) return;
  const SamplingRow& how = a.row[row];
  if (how.num_edits == 0 && how.counts < 0 && how.mask < 0) return;
  edit(a, how, x);
  penalise_and_mask(a, how, x);
  extremes[2 * a.rows + row] = static_cast<double>(largest_of(x, a.columns));
}

template <class Acc>
void histogram_row(const SamplingLogits& a, SelectBy by, int pass, int64_t* bins, int64_t row) {
  std::fill_n(bins, kSelectionBins, int64_t{0});
  if (!selects(a.row[row], by) || (pass > 0 && a.kept[row].remaining < 0)) return;
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  const int shift = selection_shift<Acc>(pass);
  const uint64_t prefix = a.kept[row].prefix;
  for (int64_t i = 0; i < own.columns; ++i) {
    const auto key = order_key(own.x[i]);
    if (pass > 0 && static_cast<uint64_t>(key >> (shift + kSelectionDigitBits)) != prefix) continue;
    if (!own.keeps(i)) continue;
    bins[key >> shift & (kSelectionBins - 1)] +=
        by == SelectBy::kCount ? 1 : own.probability(own.x[i]);
  }
}

template <class Acc>
void place_row(const SamplingLogits& a, SelectBy by, const int64_t* before, SamplingKept* found,
               int64_t row) {
  SamplingKept& kept = found[row];
  if (kept.remaining < 0) return;
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  const Acc value = OrderKey<Acc>::value(static_cast<typename OrderKey<Acc>::type>(kept.prefix));
  const int64_t ties =
      kept_ties(own, by, value, kept.remaining) - (before != nullptr ? before[row] : 0);
  int64_t last = -1, seen = 0;
  for (int64_t i = 0; i < own.columns && seen < ties; ++i) {
    if (own.x[i] != value || !own.keeps(i)) continue;
    last = own.first_id + i;
    ++seen;
  }
  kept.value = static_cast<double>(value);
  kept.last = last;
  kept.remaining = -1;
}

template <class Acc>
void draw_row(const SamplingLogits& a, double* best, int64_t row) {
  const SamplingRow& how = a.row[row];
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  const bool noisy = how.temperature > 0.0;
  uint32_t words[kRun + 64 + 4];
  Acc values[kRun];
  Acc most = -std::numeric_limits<Acc>::infinity();
  int64_t chosen = -1;
  for (int64_t i = 0; i < own.columns; i += kRun) {
    const int64_t n = std::min(kRun, own.columns - i), first = own.first_id + i, skip = first % 4;
    if (noisy) {
      philox_words_cpu(how.key, noise_block(how, first), 0, 0, (skip + n + 3) / 4, words);
      for (int64_t j = 0; j < n; ++j)
        values[j] =
            own.x[i + j] + own.temperature * static_cast<Acc>(gumbel_noise(words[skip + j]));
    } else {
      std::copy_n(own.x + i, n, values);
    }
    if (largest_of(values, n) <= most) continue;
    for (int64_t j = 0; j < n; ++j) {
      if (!(values[j] > most) || (noisy && !own.keeps(i + j))) continue;
      most = values[j];
      chosen = first + j;
    }
  }
  best[row] = static_cast<double>(most);
  best[a.rows + row] = static_cast<double>(chosen);
}

template <class Acc>
void largest_row(const SamplingLogits& a, int64_t n, double* values, int64_t* ids, int64_t row) {
  const LogitsRow<Acc> own = logits_row<Acc>(a, row);
  int64_t found = 0;
  for (int64_t i = 0; i < own.columns; ++i) {
    const double value = static_cast<double>(own.x[i]);
    if ((found == n && value <= values[n - 1]) || !own.keeps(i)) continue;
    int64_t place = std::min(found, n - 1);
    for (; place > 0 && values[place - 1] < value; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = own.first_id + i;
    found = std::min(found + 1, n);
  }
  std::fill(values + found, values + n, -std::numeric_limits<double>::infinity());
  std::fill(ids + found, ids + n, int64_t{-1});
}

// f(row) for rows [begin, end), with the type of the logits as argument.
template <class F>
void for_rows(const SamplingLogits& a, int64_t begin, int64_t end, F&& f) {
  with_accumulator(a.dtype, [&](auto acc) {
    for (int64_t row = begin; row < end; ++row) f(acc, row);
  });
}

}  // namespace

bool selects_any(const SamplingRow* rows, int64_t count, SelectBy by) {
  return std::any_of(rows, rows + count, [by](const SamplingRow& row) { return selects(row, by); });
}

void process_logits_cpu(const SamplingLogits& a, double* extremes, int64_t begin, int64_t end) {
  for_rows(a, begin, end,
           [&](auto acc, int64_t row) { process_row<decltype(acc)>(a, extremes, row); });
}

void selection_histogram_cpu(const SamplingLogits& a, SelectBy by, int pass, int64_t* histogram,
                             int64_t begin, int64_t end) {
  for_rows(a, begin, end, [&](auto acc, int64_t row) {
    histogram_row<decltype(acc)>(a, by, pass, histogram + row * kSelectionBins, row);
  });
}

void narrow_selection_cpu(const SamplingLogits& a, SelectBy by, int pass, const int64_t* histogram,
                          SamplingKept* kept, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    narrow(a.row[row], by, pass, histogram + row * kSelectionBins, kept[row]);
}

void count_ties_cpu(const SamplingLogits& a, const SamplingKept* found, int64_t* ties,
                    int64_t begin, int64_t end) {
  for_rows(a, begin, end, [&](auto acc, int64_t row) {
    using Acc = decltype(acc);
    ties[row] = 0;
    if (found[row].remaining < 0) return;
    const LogitsRow<Acc> own = logits_row<Acc>(a, row);
    const Acc value =
        OrderKey<Acc>::value(static_cast<typename OrderKey<Acc>::type>(found[row].prefix));
    for (int64_t i = 0; i < own.columns; ++i) ties[row] += own.x[i] == value && own.keeps(i);
  });
}

void place_ties_cpu(const SamplingLogits& a, SelectBy by, const int64_t* before,
                    SamplingKept* found, int64_t begin, int64_t end) {
  for_rows(a, begin, end,
           [&](auto acc, int64_t row) { place_row<decltype(acc)>(a, by, before, found, row); });
}

void draw_tokens_cpu(const SamplingLogits& a, double* best, int64_t begin, int64_t end) {
  for_rows(a, begin, end, [&](auto acc, int64_t row) { draw_row<decltype(acc)>(a, best, row); });
}

void sum_probabilities_cpu(const SamplingLogits& a, int64_t* sums, int64_t begin, int64_t end) {
  for_rows(a, begin, end, [&](auto acc, int64_t row) {
    const LogitsRow<decltype(acc)> own = logits_row<decltype(acc)>(a, row);
    sums[row] = 0;
    for (int64_t i = 0; i < own.columns; ++i)
      if (own.keeps(i)) sums[row] += own.probability(own.x[i]);
  });
}

void largest_logits_cpu(const SamplingLogits& a, int64_t n, double* values, int64_t* ids,
                        int64_t begin, int64_t end) {
  for_rows(a, begin, end, [&](auto acc, int64_t row) {
    largest_row<decltype(acc)>(a, n, values + row * n, ids + row * n, row);
  });
}

void count_tokens_cpu(const SamplingLogits& a, const int64_t* ids, int32_t* counts, int64_t begin,
                      int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t column = ids[row] - a.first_id;
    if (ids[row] >= 0 && a.row[row].counts >= 0 && column >= 0 && column < a.columns)
      counts[a.row[row].counts * a.columns + column] += 2;
  }
}

void tell_draws_cpu(const ToldDraws& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) tell_draw(args, row);
}

}  // namespace megatron
