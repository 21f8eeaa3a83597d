#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/fp8_math.h"
#include "megatron/kernels/detail/lanes.h"

namespace megatron {
namespace {

// Products of one head with positions that lie `stride` apart, in fp32, of a multiple of 16
// features: the order of additions is that of sum_over().
void dot_rows(const float* q, const float* k, int64_t stride, int64_t count, int64_t d,
              float* out) {
  for (int64_t i = 0; i < count; ++i, k += stride) {
    __m256 low = _mm256_setzero_ps(), high = low;
    for (int64_t j = 0; j < d; j += 16) {
      low = _mm256_fmadd_ps(_mm256_loadu_ps(q + j), _mm256_loadu_ps(k + j), low);
      high = _mm256_fmadd_ps(_mm256_loadu_ps(q + j + 8), _mm256_loadu_ps(k + j + 8), high);
    }
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    out[i] = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
}

// out += p v over positions, one after the other. `kVectors` of 8 features at a time stay in
// registers.
template <int kVectors>
void add_some_features(const float* p, const float* v, int64_t stride, int64_t count, float* out) {
  __m256 sums[kVectors];
  for (int j = 0; j < kVectors; ++j) sums[j] = _mm256_loadu_ps(out + 8 * j);
  for (int64_t i = 0; i < count; ++i, v += stride) {
    const __m256 weight = _mm256_set1_ps(p[i]);
    for (int j = 0; j < kVectors; ++j)
      sums[j] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(v + 8 * j), sums[j]);
  }
  for (int j = 0; j < kVectors; ++j) _mm256_storeu_ps(out + 8 * j, sums[j]);
}
void add_rows(const float* p, const float* v, int64_t stride, int64_t count, int64_t d,
              float* out) {
  int64_t j = 0;
  for (; j + 64 <= d; j += 64) add_some_features<8>(p, v + j, stride, count, out + j);
  for (; j < d; j += 16) add_some_features<2>(p, v + j, stride, count, out + j);
}

// The query heads of one row that share one key/value group.
template <class Acc>
class GroupOfHeads {
 public:
  explicit GroupOfHeads(const PagedAttention& args)
      : a_(args),
        heads_(args.heads / args.groups),
        query_(static_cast<size_t>(heads_ * args.key_size)),
        out_(static_cast<size_t>(heads_ * args.value_size)),
        scratch_(static_cast<size_t>(std::max(args.key_size, args.value_size))) {}

  void run(int64_t row, int64_t group) {
    const int64_t end = a_.lengths[row];
    first_ = a_.starts == nullptr ? 0 : a_.starts[row];
    if (a_.window_left >= 0) first_ = std::max(first_, end - 1 - a_.window_left);
    count_ = end - first_;
    blocks_ = a_.block_table + a_.sequences[row] * a_.table_stride;
    const int64_t head = row * a_.heads + group * heads_;
    score(head, group);
    const auto* sinks = static_cast<const Acc*>(a_.sinks);
    for (int64_t h = 0; h < heads_; ++h) {
      const Acc lse =
          softmax(scores_of(h), sinks == nullptr ? nullptr : sinks + group * heads_ + h);
      if (a_.lse != nullptr) static_cast<Acc*>(a_.lse)[head + h] = lse;
    }
    sum_values(head, group);
  }

 private:
  int64_t place(const PagedPool& pool, int64_t position, int64_t group) const {
    return blocks_[position / a_.block_size] * pool.block_stride +
           position % a_.block_size * pool.position_stride + group * pool.group_stride;
  }

  // The d features of a position, without the scale of FP8.
  const Acc* features(const PagedPool& pool, int64_t position, int64_t group, int64_t d) {
    const int64_t from = place(pool, position, group);
    if (pool.scale == nullptr) return load_run(a_.dtype, pool.data, from, d, scratch_.data());
    const auto* codes = static_cast<const uint8_t*>(pool.data) + from;
    for (int64_t j = 0; j < d; ++j) scratch_[static_cast<size_t>(j)] = e4m3_value(codes[j]);
    return scratch_.data();
  }
  // Whether features are read in fp32 where they lie.
  bool in_place(const PagedPool& pool, int64_t d) const {
    return std::is_same_v<Acc, float> && a_.dtype == DType::kFloat32 && pool.scale == nullptr &&
           d % 16 == 0;
  }
  // Calls f(index of the first position, address of its features, positions) for each block.
  template <class F>
  void each_run(const PagedPool& pool, int64_t group, F f) const {
    for (int64_t i = 0; i < count_;) {
      const int64_t position = first_ + i;
      const int64_t n = std::min(a_.block_size - position % a_.block_size, count_ - i);
      f(i, static_cast<const float*>(pool.data) + place(pool, position, group), n);
      i += n;
    }
  }
  static Acc scale_of(const PagedPool& pool, int64_t group) {
    return pool.scale == nullptr ? Acc{1} : static_cast<Acc>(pool.scale[group]);
  }

  void score(int64_t head, int64_t group) {
    scores_.resize(static_cast<size_t>(heads_ * count_));
    const int64_t d = a_.key_size;
    const Acc scale = static_cast<Acc>(a_.scale) * scale_of(a_.keys, group);
    const Acc cap = static_cast<Acc>(a_.softcap);
    const Acc* q = load_run(a_.dtype, a_.query, head * d, heads_ * d, query_.data());
    if constexpr (std::is_same_v<Acc, float>) {
      if (in_place(a_.keys, d)) {
        each_run(a_.keys, group, [&](int64_t i, const float* k, int64_t n) {
          for (int64_t h = 0; h < heads_; ++h)
            dot_rows(q + h * d, k, a_.keys.position_stride, n, d, &scores_of(h)[i]);
        });
        for (Acc& s : scores_) s = capped(scale * s, cap);
        return;
      }
    }
    for (int64_t i = 0; i < count_; ++i) {
      const Acc* k = features(a_.keys, first_ + i, group, d);
      for (int64_t h = 0; h < heads_; ++h) {
        const Acc* own = q + h * d;
        const Acc s = scale * sum_over<Acc>(d, [&](int64_t j) { return own[j] * k[j]; });
        scores_of(h)[i] = capped(s, cap);
      }
    }
  }
  static Acc capped(Acc s, Acc cap) { return cap > 0 ? cap * std::tanh(s / cap) : s; }
  Acc* scores_of(int64_t h) { return scores_.data() + h * count_; }

  // Returns the log sum exp. `sink`: null if there is none.
  Acc softmax(Acc* scores, const Acc* sink) const {
    Acc most = *std::max_element(scores, scores + count_);
    if (sink != nullptr) most = std::max(most, *sink);
    for (int64_t i = 0; i < count_; ++i) scores[i] = std::exp(scores[i] - most);
    Acc sum = sum_over<Acc>(count_, [&](int64_t i) { return scores[i]; });
    if (sink != nullptr) sum += std::exp(*sink - most);
    for (int64_t i = 0; i < count_; ++i) scores[i] /= sum;
    return most + std::log(sum);
  }

  void sum_values(int64_t head, int64_t group) {
    const int64_t d = a_.value_size;
    Acc* out = output_run(a_.dtype, a_.out, head * d, out_.data());
    std::fill_n(out, heads_ * d, Acc{0});
    if (in_place(a_.values, d)) {
      add_in_place(group, d, out);
    } else {
      for (int64_t i = 0; i < count_; ++i) {
        const Acc* v = features(a_.values, first_ + i, group, d);
        for (int64_t h = 0; h < heads_; ++h) {
          const Acc p = scores_of(h)[i];
          Acc* own = out + h * d;
          for (int64_t j = 0; j < d; ++j) own[j] += p * v[j];
        }
      }
    }
    if (const Acc scale = scale_of(a_.values, group); scale != Acc{1})
      for (int64_t j = 0; j < heads_ * d; ++j) out[j] *= scale;
    store_run(a_.dtype, a_.out, head * d, heads_ * d, out);
  }

  void add_in_place(int64_t group, int64_t d, Acc* out) {
    if constexpr (std::is_same_v<Acc, float>)
      each_run(a_.values, group, [&](int64_t i, const float* v, int64_t n) {
        for (int64_t h = 0; h < heads_; ++h)
          add_rows(&scores_of(h)[i], v, a_.values.position_stride, n, d, out + h * d);
      });
  }

  const PagedAttention& a_;
  int64_t heads_;
  int64_t first_ = 0, count_ = 0;  // positions that the row sees
  const int32_t* blocks_ = nullptr;
  std::vector<Acc> query_, out_, scratch_, scores_;
};

}  // namespace

void paged_attention_cpu(const PagedAttention& args, int64_t begin, int64_t end) {
  with_accumulator(args.dtype, [&](auto acc) {
    GroupOfHeads<decltype(acc)> group(args);
    for (int64_t item = begin; item < end; ++item)
      group.run(item / args.groups, item % args.groups);
  });
}

}  // namespace megatron
