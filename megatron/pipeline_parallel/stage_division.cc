#include "megatron/pipeline_parallel/stage_division.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/cost_division.h"

namespace megatron {
namespace {

// Divisions are given by the ends of all segments but the last.
using Ends = std::vector<int64_t>;

class Divider {
 public:
  explicit Divider(const StageLoads& loads)
      : loads_(loads),
        stages_(std::ssize(loads.in_flight)),
        segments_(stages_ * loads.chunks),
        layers_(std::ssize(loads.layers)) {
    // Whole numbers, whose sums do not depend on their order.
    const double unit = total(&LayerLoad::time) / kParts;
    for (const LayerLoad& layer : loads.layers)
      times_.push_back(times_.back() + std::llround(layer.time / unit));
    embedding_ = std::llround(loads.embedding.time / unit);
    head_ = std::llround(loads.head.time / unit);
    const auto add = [](std::vector<double>& sums, double more) {
      sums.push_back(sums.back() + more);
    };
    for (const LayerLoad& layer : loads.layers) {
      add(weights_, layer.weights);
      add(saved_, layer.saved);
    }
  }

  Ends best() const {
    if (loads_.chunks == 1) return best_of_one_chunk();
    return number_of_divisions() <= kMostDivisions ? best_of_all() : best_nearby();
  }

 private:
  static constexpr double kParts = 1e12, kMostDivisions = 5e4;

  // Of the stage that has most.
  struct Value {
    int64_t time = 0;
    double memory = 0;
    bool operator<(const Value& other) const {
      return time != other.time ? time < other.time : memory < other.memory * (1 - 1e-9);
    }
  };

  double total(double LayerLoad::* what) const {
    double sum = loads_.embedding.*what + loads_.head.*what;
    for (const LayerLoad& layer : loads_.layers) sum += layer.*what;
    return sum;
  }

  double number_of_divisions() const {  // layers - 1 over segments - 1
    double number = 1;
    for (int64_t i = 1; i < segments_; ++i)
      number *= static_cast<double>(layers_ - i) / static_cast<double>(i);
    return number;
  }

  // Of segment `segment` with layers [from, to).
  Value segment_value(int64_t segment, int64_t from, int64_t to) const {
    const auto a = static_cast<size_t>(from), b = static_cast<size_t>(to);
    const auto stage = static_cast<size_t>(stage_of(segment));
    Value value{times_[b] - times_[a],
                weights_[b] - weights_[a] + loads_.in_flight[stage] * (saved_[b] - saved_[a])};
    const auto with = [&](bool is_there, int64_t time, const LayerLoad& load) {
      if (!is_there) return;
      value.time += time;
      value.memory += load.weights + loads_.in_flight[stage] * load.saved;
    };
    with(segment == 0, embedding_, loads_.embedding);
    with(segment == segments_ - 1, head_, loads_.head);
    return value;
  }

  int64_t stage_of(int64_t segment) const {
    return place_of(loads_.placement, static_cast<int>(stages_), static_cast<int>(segment)).stage;
  }

  Value value(const Ends& ends) const {
    std::vector<Value> stages(static_cast<size_t>(stages_));
    for (int64_t i = 0; i < segments_; ++i) {
      const Value one = segment_value(i, begin(ends, i), end(ends, i));
      Value& all = stages[static_cast<size_t>(stage_of(i))];
      all.time += one.time;
      all.memory += one.memory;
    }
    Value most;
    for (const Value& stage : stages) {
      most.time = std::max(most.time, stage.time);
      most.memory = std::max(most.memory, stage.memory);
    }
    return most;
  }
  int64_t begin(const Ends& ends, int64_t i) const {
    return i == 0 ? 0 : ends[static_cast<size_t>(i - 1)];
  }
  int64_t end(const Ends& ends, int64_t i) const {
    return i + 1 == segments_ ? layers_ : ends[static_cast<size_t>(i)];
  }

  // The last layers from `from` on, in the last segments from `segment` on: the least of the
  // largest times, and of those within `time` of the largest memories.
  using Rest = std::vector<std::vector<Value>>;
  Rest rests(int64_t time) const {
    constexpr Value kNone{std::numeric_limits<int64_t>::max(), HUGE_VAL};
    Rest rest(static_cast<size_t>(segments_) + 1,
              std::vector<Value>(static_cast<size_t>(layers_) + 1, kNone));
    rest.back().back() = {};
    for (int64_t segment = segments_ - 1; segment >= 0; --segment)
      for (int64_t from = segment; from < layers_; ++from)
        for (int64_t to = from + 1; to <= layers_; ++to) {
          const Value own = segment_value(segment, from, to);
          const Value& behind = rest[static_cast<size_t>(segment) + 1][static_cast<size_t>(to)];
          Value& best = rest[static_cast<size_t>(segment)][static_cast<size_t>(from)];
          best.time = std::min(best.time, std::max(own.time, behind.time));
          if (own.time <= time)
            best.memory = std::min(best.memory, std::max(own.memory, behind.memory));
        }
    return rest;
  }

  Ends best_of_one_chunk() const {
    const int64_t time = rests(std::numeric_limits<int64_t>::max()).front().front().time;
    const Rest rest = rests(time);
    const double memory = rest.front().front().memory * (1 + 1e-9);
    Ends ends;
    for (int64_t segment = 0, from = 0; segment + 1 < segments_; ++segment) {
      int64_t to = from + 1;
      const auto fits = [&] {
        const Value own = segment_value(segment, from, to);
        return own.time <= time && own.memory <= memory &&
               rest[static_cast<size_t>(segment) + 1][static_cast<size_t>(to)].memory <= memory;
      };
      while (!fits()) ++to;
      ends.push_back(from = to);
    }
    return ends;
  }

  Ends best_of_all() const {
    Ends ends;
    for (int64_t i = 1; i < segments_; ++i) ends.push_back(i);
    Ends best = ends;
    Value least = value(ends);
    const auto next = [&] {  // in the order of early ends
      for (size_t i = ends.size(); i-- > 0;) {
        const auto behind = static_cast<int64_t>(ends.size() - i);
        if (ends[i] + behind >= layers_) continue;
        ++ends[i];
        for (size_t j = i + 1; j < ends.size(); ++j) ends[j] = ends[j - 1] + 1;
        return true;
      }
      return false;
    };
    while (next())
      if (const Value now = value(ends); now < least) {
        least = now;
        best = ends;
      }
    return best;
  }

  Ends best_nearby() const {
    std::vector<double> times;
    for (const LayerLoad& layer : loads_.layers) times.push_back(layer.time);
    times.front() += loads_.embedding.time;
    Ends ends;
    int64_t last = 0;
    for (const int64_t count : divide_by_cost(times, loads_.head.time, segments_))
      ends.push_back(last += count);
    ends.pop_back();
    Value least = value(ends);
    for (bool found = true; found;) {
      found = false;
      for (size_t i = 0; i < ends.size(); ++i)
        for (const int64_t by : {-1, 1}) {
          Ends moved = ends;
          moved[i] += by;
          const auto segment = static_cast<int64_t>(i);
          if (moved[i] <= begin(moved, segment) || moved[i] >= end(moved, segment + 1)) continue;
          const Value now = value(moved);
          if (!(now < least)) continue;
          least = now;
          ends = std::move(moved);
          found = true;
        }
    }
    return ends;
  }

  const StageLoads& loads_;
  const int64_t stages_, segments_, layers_;
  std::vector<int64_t> times_ = {0};  // sums of the layers before each
  std::vector<double> weights_ = {0}, saved_ = {0};
  int64_t embedding_ = 0, head_ = 0;
};

}  // namespace

std::vector<int64_t> divide_over_stages(const StageLoads& loads) {
  const Ends ends = Divider(loads).best();
  std::vector<int64_t> counts;
  int64_t last = 0;
  for (const int64_t end : ends) counts.push_back(end - std::exchange(last, end));
  counts.push_back(std::ssize(loads.layers) - last);
  MEGATRON_ASSERT(std::ranges::min(counts) > 0, "a segment without layers");
  return counts;
}

}  // namespace megatron
