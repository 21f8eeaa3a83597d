#include "megatron/distributed/buffer_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr int64_t kParameterAlignment = 64;  // elements

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Builds the layout while parameters are appended.
class Planner {
 public:
  Planner(const std::vector<BufferParameter>& parameters, const BufferOptions& options)
      : parameters_(parameters), options_(options) {
    layout_.slots.resize(parameters.size());
    int64_t largest = 0;
    for (const BufferParameter& parameter : parameters)
      if (parameter.whole) largest = std::max(largest, parameter.num_elements);
    bucket_size_ = options.bucket_size;
    if (bucket_size_ > 0 && options.num_shards > 1)
      bucket_size_ = std::max(bucket_size_, options.num_shards * largest);
  }

  void append(int index, const BufferParameter& parameter) {
    const bool own = parameter.own_bucket && !parameter.frozen;
    if (own || parameter.unit != unit_) close();
    unit_ = parameter.unit;
    const int64_t begin = round_up(end_, kParameterAlignment);
    end_ = begin + parameter.num_elements;
    layout_.slots[index] = {begin, end_, static_cast<int>(layout_.buckets.size())};
    table_ = (open_.empty() || table_) && parameter.embedding;
    open_.push_back(index);
    const bool full = bucket_size_ > 0 && end_ - bucket_begin_ >= bucket_size_;
    if (full || own) close(own);
  }

  // The parameters that follow are frozen.
  void end_trained() {
    close();
    frozen_ = true;
    layout_.num_trained_elements = end_;
    layout_.num_trained_buckets = static_cast<int>(layout_.buckets.size());
  }

  BufferLayout finish() {
    close();
    layout_.num_elements = layout_.buckets.empty() ? 0 : layout_.buckets.back().end;
    return std::move(layout_);
  }

 private:
  void close(bool own = false) {
    if (open_.empty()) return;
    const int64_t unit = options_.num_shards > 1
                             ? std::lcm(options_.num_shards, options_.shard_alignment)
                             : kParameterAlignment;
    end_ = round_up(end_, unit);
    const bool whole = std::any_of(open_.begin(), open_.end(),
                                   [&](int index) { return parameters_[index].whole; });
    if (whole && options_.num_shards > 1) keep_whole(unit);
    layout_.buckets.push_back({bucket_begin_, end_, std::move(open_), own, unit_, frozen_, table_});
    open_.clear();
    bucket_begin_ = end_;
  }

  // Moves the parameters of the open bucket so that no border of its slices cuts a whole one. A
  // slice in which they fit is followed only by slices in which they fit, so the smallest one is
  // found by halving.
  void keep_whole(int64_t unit) {
    const int64_t step = std::lcm(unit / options_.num_shards, kParameterAlignment);
    int64_t fits = round_up(end_ - bucket_begin_, step) / step, too_small = 0;
    while (fits - too_small > 1) {
      const int64_t middle = too_small + (fits - too_small) / 2;
      (place(middle * step) ? fits : too_small) = middle;
    }
    place(fits * step);
    end_ = bucket_begin_ + options_.num_shards * fits * step;
  }

  // Places them for slices of that size; false if they need more slices than there are shards.
  bool place(int64_t slice) {
    int64_t end = 0;
    for (const int index : open_) {
      const int64_t size = parameters_[index].num_elements;
      int64_t begin = round_up(end, kParameterAlignment);
      if (parameters_[index].whole && begin % slice + size > slice) begin = round_up(begin, slice);
      if (parameters_[index].whole && size > slice) return false;
      end = begin + size;
      layout_.slots[index].begin = bucket_begin_ + begin;
      layout_.slots[index].end = bucket_begin_ + end;
    }
    return end <= options_.num_shards * slice;
  }

  const std::vector<BufferParameter>& parameters_;
  const BufferOptions options_;
  int64_t bucket_size_ = 0;
  BufferLayout layout_;
  std::vector<int> open_;
  int unit_ = 0;
  bool frozen_ = false;
  bool table_ = false;  // so far only embeddings
  int64_t bucket_begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace

ModelPart part_of_model(const std::string& parameter) {
  constexpr std::string_view kLayers = ".layers.";
  const size_t at = parameter.find(kLayers);
  if (at == std::string::npos) return {parameter.substr(0, parameter.find('.'))};
  const size_t number = at + kLayers.size();
  return {parameter.substr(0, parameter.find('.', number)), std::stoll(parameter.substr(number))};
}

std::vector<int> sharding_units(const std::vector<std::string>& names,
                                const std::vector<bool>& norms) {
  std::vector<int> units;
  std::string last;
  int unit = 0;
  bool waits = true;  // no module yet that a norm could join
  for (size_t i = 0; i < names.size(); ++i) {
    const ModelPart part = part_of_model(names[i]);
    const bool joins = norms[i] && !part.is_layer();
    if (!joins) {
      if (part.name != last && !waits) ++unit;
      waits = false;
      last = part.name;
    }
    units.push_back(unit);
  }
  return units;
}

BufferLayout plan_buffer(const std::vector<BufferParameter>& parameters,
                         const BufferOptions& options) {
  MEGATRON_ASSERT(options.bucket_size >= 0 && options.num_shards >= 1 &&
                  options.shard_alignment >= 1);
  Planner planner(parameters, options);
  for (const bool frozen : {false, true}) {
    if (frozen) planner.end_trained();
    for (size_t i = parameters.size(); i-- > 0;) {
      MEGATRON_ASSERT(parameters[i].num_elements >= 0);
      if (parameters[i].frozen == frozen) planner.append(static_cast<int>(i), parameters[i]);
    }
  }
  return planner.finish();
}

std::vector<int> gathered_together(const BufferLayout& layout) {
  std::vector<int> firsts;
  std::map<int, int> first_of_unit;
  for (const BufferBucket& bucket : layout.buckets) {
    const int index = static_cast<int>(firsts.size());
    firsts.push_back(bucket.own ? index
                                : first_of_unit.try_emplace(bucket.unit, index).first->second);
  }
  return firsts;
}

}  // namespace megatron
