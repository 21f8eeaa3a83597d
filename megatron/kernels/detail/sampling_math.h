// The scalar formulas of kernels/sampling.h, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/math.h"
#include "megatron/kernels/detail/philox_math.h"
#include "megatron/kernels/sampling.h"

namespace megatron {

constexpr int kSelectionDigitBits = 8;

// Gumbel noise, -ln(-ln(1 - t)) with t = (word + 1/2) / 2^32. Precise to a few ulp where it is
// large, which is where it decides: t is then small.
MEGATRON_HOST_DEVICE float gumbel_noise(uint32_t word) {
  const auto unit = [](uint32_t bits) {
    const float high = static_cast<float>(static_cast<int32_t>(bits >> 16));
    const float low = static_cast<float>(static_cast<int32_t>(bits & 0xffffu));
    return fused(high, 1.52587890625e-5f,
                 fused(low, 2.3283064365386963e-10f, 1.1641532182693481e-10f));
  };
  const float t = unit(word);
  // ln(1 + y) = ln(u) y / (u - 1) with u = 1 + y rounded (Kahan)
  const float rest = 1.0f - t, lost = 1.0f - rest;
  const float near_zero = lost == 0.0f ? t : -fast_log(rest) * (t / lost);
  const float exponential = t < 0.5f ? near_zero : -fast_log(unit(~word));
  return -fast_log(exponential);
}

// The word of an id.
MEGATRON_HOST_DEVICE uint64_t noise_block(const SamplingRow& row, int64_t id) {
  return (static_cast<uint64_t>(row.position) << 32) + static_cast<uint64_t>(id) / 4;
}

template <class Acc>
struct OrderKey;
template <>
struct OrderKey<float> {
  using type = uint32_t;
  static MEGATRON_HOST_DEVICE float value(uint32_t key) {
    return float_from_bits((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
  }
};
template <>
struct OrderKey<double> {
  using type = uint64_t;
  static MEGATRON_HOST_DEVICE double value(uint64_t key) {
    const uint64_t bits = (key >> 63) != 0 ? key & ~(uint64_t{1} << 63) : ~key;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// One row of logits, and what is kept of it.
template <class Acc>
struct LogitsRow {
  const Acc* x = nullptr;
  int64_t columns = 0, first_id = 0;
  Acc largest = 0, temperature = 1;
  Acc floor = 0, value = 0;
  int64_t last = 0;

  MEGATRON_HOST_DEVICE bool keeps(int64_t column) const {
    const Acc logit = x[column];
    return logit >= floor && (logit > value || (logit == value && first_id + column <= last));
  }
  // Probability over that of the largest logit, as an integer.
  MEGATRON_HOST_DEVICE int64_t probability(Acc logit) const {
    return static_cast<int64_t>(fast_exp((logit - largest) / temperature) *
                                static_cast<Acc>(kWholeProbability));
  }
};

// Keeps nothing in a row in which nothing is allowed or a logit is infinite.
template <class Acc>
MEGATRON_HOST_DEVICE LogitsRow<Acc> logits_row(const SamplingLogits& logits, int64_t row) {
  constexpr Acc kLowest =
      sizeof(Acc) == 4 ? Acc(-3.4028234663852886e38) : static_cast<Acc>(-1.7976931348623157e308);
  LogitsRow<Acc> out;
  out.x = static_cast<const Acc*>(logits.logits) + row * logits.stride;
  out.columns = logits.columns;
  out.first_id = logits.first_id;
  out.largest = static_cast<Acc>(logits.largest[row]);
  out.floor = kLowest;
  out.value = -INFINITY;
  if (logits.kept != nullptr) {
    out.value = static_cast<Acc>(logits.kept[row].value);
    out.last = logits.kept[row].last;
  }
  if (!(out.largest <= -kLowest)) {
    out.value = INFINITY;
    out.last = -1;
  }
  if (logits.row == nullptr) return out;
  const SamplingRow& how = logits.row[row];
  if (how.temperature > 0.0) out.temperature = static_cast<Acc>(how.temperature);
  if (how.has_min_p != 0 && how.temperature > 0.0 && out.largest >= kLowest)
    out.floor = out.largest + out.temperature * static_cast<Acc>(how.log_min_p);
  return out;
}

// Whether a phase of the selection has something to do in a row.
MEGATRON_HOST_DEVICE bool selects(const SamplingRow& row, SelectBy by) {
  if (!(row.temperature > 0.0)) return false;
  return by == SelectBy::kCount ? row.top_k > 0 : row.top_p < 1.0;
}

// Probability, or ids, that the kept ones reach, from the sum over all candidates.
MEGATRON_HOST_DEVICE int64_t selection_target(const SamplingRow& row, SelectBy by, int64_t total) {
  if (by == SelectBy::kCount) return row.top_k < total ? row.top_k : -1;
  if (total <= 0) return -1;
  const double wanted = row.top_p * static_cast<double>(total);
  int64_t target = static_cast<int64_t>(wanted);
  if (static_cast<double>(target) < wanted) ++target;
  return target < 1 ? 1 : target > total ? total : target;
}

// Bits of a digit, counted from the lowest bit of the key.
template <class Acc>
MEGATRON_HOST_DEVICE int selection_shift(int pass) {
  return static_cast<int>(sizeof(Acc)) * 8 - kSelectionDigitBits * (pass + 1);
}

// Goes through the bins of a row from the highest digit on.
MEGATRON_HOST_DEVICE void narrow(const SamplingRow& row, SelectBy by, int pass,
                                 const int64_t* histogram, SamplingKept& kept) {
  if (pass == 0) {
    int64_t total = 0;
    for (int bin = 0; bin < kSelectionBins; ++bin) total += histogram[bin];
    kept.prefix = 0;
    kept.remaining = selects(row, by) ? selection_target(row, by, total) : -1;
  }
  if (kept.remaining < 0) return;
  int bin = kSelectionBins - 1;
  for (; bin > 0 && histogram[bin] < kept.remaining; --bin) kept.remaining -= histogram[bin];
  kept.prefix = kept.prefix << kSelectionDigitBits | static_cast<uint64_t>(bin);
}

// Of ids with the value that was found: how many are kept, on all ranks.
template <class Acc>
MEGATRON_HOST_DEVICE int64_t kept_ties(const LogitsRow<Acc>& row, SelectBy by, Acc value,
                                       int64_t remaining) {
  if (by == SelectBy::kCount) return remaining;
  const int64_t each = row.probability(value);
  return each > 0 ? (remaining + each - 1) / each : remaining;
}

// The logit of an id after penalties: `count` as in SamplingLogits::counts.
template <class Acc>
MEGATRON_HOST_DEVICE Acc penalised(Acc logit, const SamplingRow& row, int32_t count) {
  if (count == 0) return logit;
  const Acc repetition = static_cast<Acc>(row.repetition_penalty);
  logit = logit > Acc(0) ? logit / repetition : logit * repetition;
  const Acc times = static_cast<Acc>(count / 2);
  logit -= static_cast<Acc>(row.frequency_penalty) * times;
  return times > Acc(0) ? logit - static_cast<Acc>(row.presence_penalty) : logit;
}

MEGATRON_HOST_DEVICE bool is_masked(const SamplingLogits& logits, const SamplingRow& row,
                                    int64_t id) {
  if (row.mask < 0) return false;
  const uint32_t word = logits.masks[row.mask * logits.mask_words + id / 32];
  return (word >> (id % 32) & 1u) == 0;
}

// Whether logits hold neither NaN nor infinity, and not -infinity alone, which excludes an id.
MEGATRON_HOST_DEVICE void tell_draw(const ToldDraws& a, int64_t row) {
  const double most = a.extremes[a.rows + row];
  const bool finite = a.extremes[row] == 0.0 && most - most == 0.0;
  const int64_t id = a.ids[row], kept = finite && id >= 0 ? id : 0;
  a.kept[row] = kept;
  a.numbers[row] = static_cast<double>(kept);
  a.numbers[a.rows + 2 * row] = static_cast<double>(id);
  a.numbers[a.rows + 2 * row + 1] = finite ? 1.0 : 0.0;
}

// Whether (value, id) comes before another in the order of falling values, then rising ids.
// Ids are at least 0; a negative one stands for nothing.
template <class Acc>
MEGATRON_HOST_DEVICE bool precedes(Acc value, int64_t id, Acc other, int64_t other_id) {
  if (other_id < 0 || id < 0) return id >= 0;
  return value > other || (value == other && id < other_id);
}

}  // namespace megatron
