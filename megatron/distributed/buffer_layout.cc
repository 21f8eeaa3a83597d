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
    if (own || parameter.unit != unit_) close_all();
    unit_ = parameter.unit;
    Open& open = parameter.wide ? wide_ : narrow_;
    const int64_t begin = round_up(open.size, kParameterAlignment);
    open.size = begin + parameter.num_elements;
    layout_.slots[index] = {begin, open.size, 0};  // close() makes it a place in the buffer
    open.table = (open.parameters.empty() || open.table) && parameter.embedding;
    open.parameters.push_back(index);
    const bool full = bucket_size_ > 0 && open.size >= bucket_size_;
    if (full || own) close(open, own);
  }

  // The parameters that follow are frozen.
  void end_trained() {
    close_all();
    frozen_ = true;
    layout_.num_trained_elements = end_;
    layout_.num_trained_buckets = static_cast<int>(layout_.buckets.size());
  }

  BufferLayout finish() {
    close_all();
    layout_.num_elements = end_;
    layout_.num_value_elements = value_end_;
    return std::move(layout_);
  }

 private:
  // A bucket that fills. Its slots count from its start.
  struct Open {
    std::vector<int> parameters;
    int64_t size = 0;
    bool table = false;  // so far only embeddings
  };

  void close_all() {
    close(narrow_);
    close(wide_);
  }

  void close(Open& open, bool own = false) {
    if (open.parameters.empty()) return;
    const int64_t unit = options_.num_shards > 1
                             ? std::lcm(options_.num_shards, options_.shard_alignment)
                             : kParameterAlignment;
    open.size = round_up(open.size, unit);
    const bool whole = std::any_of(open.parameters.begin(), open.parameters.end(),
                                   [&](int index) { return parameters_[index].whole; });
    if (whole && options_.num_shards > 1) keep_whole(open, unit);
    for (const int index : open.parameters) {
      BufferSlot& slot = layout_.slots[index];
      slot = {end_ + slot.begin, end_ + slot.end, static_cast<int>(layout_.buckets.size())};
    }
    BufferBucket bucket;
    bucket.begin = end_;
    bucket.end = end_ += open.size;
    bucket.own = own;
    bucket.unit = unit_;
    bucket.frozen = frozen_;
    bucket.table = open.table;
    bucket.wide = &open == &wide_;
    bucket.value_begin = value_end_;
    bucket.value_elements = open.size * (bucket.wide ? options_.wide_elements : 1);
    value_end_ += bucket.value_elements;
    bucket.parameters = std::move(open.parameters);
    layout_.buckets.push_back(std::move(bucket));
    open = {};
  }

  // Moves the parameters of the open bucket so that no border of its slices cuts a whole one. A
  // slice in which they fit is followed only by slices in which they fit, so the smallest one is
  // found by halving.
  void keep_whole(Open& open, int64_t unit) {
    const int64_t step = std::lcm(unit / options_.num_shards, kParameterAlignment);
    int64_t fits = round_up(open.size, step) / step, too_small = 0;
    while (fits - too_small > 1) {
      const int64_t middle = too_small + (fits - too_small) / 2;
      (place(open, middle * step) ? fits : too_small) = middle;
    }
    place(open, fits * step);
    open.size = options_.num_shards * fits * step;
  }

  // Places them for slices of that size; false if they need more slices than there are shards.
  bool place(const Open& open, int64_t slice) {
    int64_t end = 0;
    for (const int index : open.parameters) {
      const int64_t size = parameters_[index].num_elements;
      int64_t begin = round_up(end, kParameterAlignment);
      if (parameters_[index].whole && begin % slice + size > slice) begin = round_up(begin, slice);
      if (parameters_[index].whole && size > slice) return false;
      end = begin + size;
      layout_.slots[index].begin = begin;
      layout_.slots[index].end = end;
    }
    return end <= options_.num_shards * slice;
  }

  const std::vector<BufferParameter>& parameters_;
  const BufferOptions options_;
  int64_t bucket_size_ = 0;
  BufferLayout layout_;
  Open narrow_, wide_;
  int unit_ = 0;
  bool frozen_ = false;
  int64_t end_ = 0;        // of the closed buckets
  int64_t value_end_ = 0;  // of their values
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
                  options.shard_alignment >= 1 && options.wide_elements >= 1);
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
