#include "megatron/distributed/buffer_layout.h"

#include <algorithm>
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
  Planner(size_t num_parameters, const BufferOptions& options) : options_(options) {
    layout_.slots.resize(num_parameters);
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
    const bool full = options_.bucket_size > 0 && end_ - bucket_begin_ >= options_.bucket_size;
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
    layout_.buckets.push_back({bucket_begin_, end_, std::move(open_), own, unit_, frozen_, table_});
    open_.clear();
    bucket_begin_ = end_;
  }

  const BufferOptions options_;
  BufferLayout layout_;
  std::vector<int> open_;
  int unit_ = 0;
  bool frozen_ = false;
  bool table_ = false;  // so far only embeddings
  int64_t bucket_begin_ = 0;
  int64_t end_ = 0;
};

// "decoder.layers.3" of "decoder.layers.3.mlp.linear_fc1.weight"; "embedding" of
// "embedding.word_embeddings.weight".
std::string part_of_model(const std::string& name) {
  constexpr std::string_view kLayers = ".layers.";
  const size_t first = name.find('.');
  if (first == std::string::npos || name.compare(first, kLayers.size(), kLayers) != 0)
    return name.substr(0, first);
  return name.substr(0, name.find('.', first + kLayers.size()));
}

}  // namespace

std::vector<int> sharding_units(const std::vector<std::string>& names) {
  constexpr std::string_view kStack = "decoder";
  std::vector<int> units;
  std::string last;
  int unit = 0;
  bool waits = true;  // no module yet that the stack's parameters could join
  for (const std::string& name : names) {
    const std::string part = part_of_model(name);
    if (part != last && part != kStack) {
      if (!waits) ++unit;
      waits = false;
    }
    last = part;
    units.push_back(unit);
  }
  return units;
}

BufferLayout plan_buffer(const std::vector<BufferParameter>& parameters,
                         const BufferOptions& options) {
  MEGATRON_ASSERT(options.bucket_size >= 0 && options.num_shards >= 1 &&
                  options.shard_alignment >= 1);
  Planner planner(parameters.size(), options);
  for (const bool frozen : {false, true}) {
    if (frozen) planner.end_trained();
    for (size_t i = parameters.size(); i-- > 0;) {
      MEGATRON_ASSERT(parameters[i].num_elements >= 0);
      if (parameters[i].frozen == frozen) planner.append(static_cast<int>(i), parameters[i]);
    }
  }
  return planner.finish();
}

}  // namespace megatron
