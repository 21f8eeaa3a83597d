#include <algorithm>
#include <cmath>
#include <vector>

#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/fp8_math.h"
#include "megatron/kernels/detail/lanes.h"

namespace megatron {
namespace {

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
      const Acc lse = softmax(&scores_[static_cast<size_t>(h * count_)],
                              sinks == nullptr ? nullptr : sinks + group * heads_ + h);
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
  static Acc scale_of(const PagedPool& pool, int64_t group) {
    return pool.scale == nullptr ? Acc{1} : static_cast<Acc>(pool.scale[group]);
  }

  void score(int64_t head, int64_t group) {
    scores_.resize(static_cast<size_t>(heads_ * count_));
    const int64_t d = a_.key_size;
    const Acc scale = static_cast<Acc>(a_.scale) * scale_of(a_.keys, group);
    const Acc cap = static_cast<Acc>(a_.softcap);
    const Acc* q = load_run(a_.dtype, a_.query, head * d, heads_ * d, query_.data());
    for (int64_t i = 0; i < count_; ++i) {
      const Acc* k = features(a_.keys, first_ + i, group, d);
      for (int64_t h = 0; h < heads_; ++h) {
        const Acc* own = q + h * d;
        const Acc s = scale * sum_over<Acc>(d, [&](int64_t j) { return own[j] * k[j]; });
        scores_[static_cast<size_t>(h * count_ + i)] = cap > 0 ? cap * std::tanh(s / cap) : s;
      }
    }
  }

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
    for (int64_t i = 0; i < count_; ++i) {
      const Acc* v = features(a_.values, first_ + i, group, d);
      for (int64_t h = 0; h < heads_; ++h) {
        const Acc p = scores_[static_cast<size_t>(h * count_ + i)];
        Acc* own = out + h * d;
        for (int64_t j = 0; j < d; ++j) own[j] += p * v[j];
      }
    }
    if (const Acc scale = scale_of(a_.values, group); scale != Acc{1})
      for (int64_t j = 0; j < heads_ * d; ++j) out[j] *= scale;
    store_run(a_.dtype, a_.out, head * d, heads_ * d, out);
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
