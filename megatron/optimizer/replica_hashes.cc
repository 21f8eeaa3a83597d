#include "megatron/optimizer/replica_hashes.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/gather_texts.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr size_t kMostReported = 16;  // tensors per rank

// "rank 3", "ranks 0, 1 and 3", "ranks 0, 1, 2, 3 and 96 more".
std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kNamed = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  const size_t named = ranks.size() <= kNamed ? ranks.size() : kNamed / 2;
  for (size_t i = 0; i < named; ++i) {
    const bool last = i + 1 == ranks.size();
    text += cat(i == 0 ? "" : last ? " and " : ", ", ranks[i]);
  }
  return named == ranks.size() ? text : text + cat(" and ", ranks.size() - named, " more");
}

struct Copy {
  int rank;
  std::string place;  // equal on ranks that differ only in their data
  std::string hash;
};
// All replicas of one tensor.
using Copies = std::vector<Copy>;

struct Verdict {
  std::string text;
  bool majority = false;
};

// "TENSOR differs on rank 2 from ranks 0, 1 and 3".
Verdict verdict(const std::string& tensor, const Copies& copies) {
  std::map<std::string, std::vector<int>> by_hash;
  for (const Copy& copy : copies) by_hash[copy.hash].push_back(copy.rank);
  const auto most = std::max_element(
      by_hash.begin(), by_hash.end(),
      [](const auto& x, const auto& y) { return x.second.size() < y.second.size(); });
  std::vector<int> others, all;
  for (const Copy& copy : copies) {
    all.push_back(copy.rank);
    if (copy.hash != most->first) others.push_back(copy.rank);
  }
  if (2 * most->second.size() > copies.size())
    return {cat(tensor, " differs on ", ranks_text(others), " from ", ranks_text(most->second)),
            true};
  return {cat(tensor, " differs between ", ranks_text(all))};
}

// An error of one rank may have spread: a tensor rank that computes with a wrong copy gives others
// wrong activations, and their gradients are summed over the data ranks. If there is no overall
// majority, compare only ranks that differ in their data.
Verdict verdict_of_data_ranks(const std::string& tensor, const Copies& copies) {
  const Verdict all = verdict(tensor, copies);
  if (all.majority) return all;
  std::map<std::string, Copies> by_place;
  for (const Copy& copy : copies) by_place[copy.place].push_back(copy);
  for (const auto& [place, some] : by_place) {
    const bool differ = std::any_of(
        some.begin(), some.end(), [&](const Copy& copy) { return copy.hash != some.front().hash; });
    if (differ) return verdict(tensor, some);
  }
  return all;
}

}  // namespace

ReplicaHashes::ReplicaHashes(const Optimizer& optimizer,
                             const std::vector<DistributedDataParallel*>& trained,
                             const std::vector<DistributedDataParallel*>& frozen,
                             const ProcessGroup& world)
    : groups_(trained.front()->groups()),
      data_(trained.front()->data_groups()),
      world_(world),
      device_(trained.front()->flat_values().device()) {
  std::map<std::string, const Parameter*> by_name;
  const auto add_values = [&](const DistributedDataParallel& store, const char* kind) {
    const std::vector<StateTensor> parts = store.state();
    for (size_t i = 0; i < store.parameters().size(); ++i) {
      const Parameter& parameter = *store.parameters()[i];
      const bool whole = !store.shards_values();
      add_item(parameter, kind, whole ? parameter.value.view({-1}) : parts[i].data, whole);
    }
  };
  for (const DistributedDataParallel* store : trained) {
    add_values(*store, "weight");
    for (const Parameter* parameter : store->parameters()) by_name[parameter->name] = parameter;
  }
  for (const DistributedDataParallel* store : frozen)
    add_values(*store, "weight of the reference model");
  const std::string prefix = "optimizer.state.";
  for (const StateTensor& entry : optimizer.tensors()) {
    const std::string& key = entry.description.key;
    const size_t dot = key.find('.', prefix.size());
    const std::string kind = key.substr(prefix.size(), dot - prefix.size());
    add_item(*by_name.at(key.substr(dot + 1)),
             kind == "fp32_param" ? "master weight" : kind.c_str(), entry.data, false);
  }
  make_batches();
  make_joins();
  hashes_ = at::zeros({size()}, at::TensorOptions().dtype(at::kLong).device(device_));
}

void ReplicaHashes::add_item(const Parameter& parameter, const char* kind, const at::Tensor& data,
                             bool whole_value) {
  Item item;
  item.tensor = cat(parameter.name, " (", kind, ")");
  item.data = data;
  item.before = std::string_view(kind).starts_with("weight");
  const DataGrid& grid = grid_of(parameter);
  if (grid.replica.size() > 1) item.copies.push_back(&grid.replica);
  if (whole_value && grid.shard.size() > 1) item.copies.push_back(&grid.shard);
  for (const ProcessGroup* group : copy_groups(parameter, groups_)) item.copies.push_back(group);
  if (item.copies.empty()) return;
  item.shared = parameter.shared;
  const int part = replica_index(shard_groups(parameter.placement, groups_)).index;
  item.key = cat(item.tensor, "|", whole_value ? 0 : grid.shard.rank(), "|", part);
  items_.push_back(std::move(item));
}

const DataGrid& ReplicaHashes::grid_of(const Parameter& parameter) const {
  return data_.at(domain_of(parameter.placement, groups_));
}

void ReplicaHashes::make_joins() {
  // Stages that share a parameter come last, so that all ranks of a stage have one order.
  std::vector<const ProcessGroup*> groups, shared;
  for (const Item& item : items_) {
    for (const ProcessGroup* group : item.copies) {
      std::vector<const ProcessGroup*>& known = group == item.shared ? shared : groups;
      if (std::find(known.begin(), known.end(), group) == known.end()) known.push_back(group);
    }
  }
  groups.insert(groups.end(), shared.begin(), shared.end());
  for (const ProcessGroup* group : groups) {
    joins_.emplace_back(group, places([&](const Item& item) {
                          return std::find(item.copies.begin(), item.copies.end(), group) !=
                                 item.copies.end();
                        }));
  }
}

void ReplicaHashes::make_batches() {
  const auto rank_of = [&](const Item& item) {
    return std::pair(!item.before, item.data.device() != device_);
  };
  std::stable_sort(items_.begin(), items_.end(),
                   [&](const Item& x, const Item& y) { return rank_of(x) < rank_of(y); });
  for (size_t begin = 0, end = 0; begin < items_.size(); begin = end) {
    std::vector<at::Tensor> tensors;
    for (; end < items_.size() && rank_of(items_[end]) == rank_of(items_[begin]); ++end)
      tensors.push_back(items_[end].data);
    (items_[begin].before ? before_ : after_)
        .push_back({static_cast<int64_t>(begin), static_cast<int64_t>(end),
                    TensorHashes(std::move(tensors))});
  }
}

template <class Chosen>
at::Tensor ReplicaHashes::places(const Chosen& chosen) const {
  std::vector<int64_t> found;
  for (size_t i = 0; i < items_.size(); ++i)
    if (chosen(items_[i])) found.push_back(static_cast<int64_t>(i));
  return found.empty() ? at::Tensor() : at::tensor(found, at::kLong).to(device_);
}

void ReplicaHashes::compute(const std::vector<Batch>& batches) {
  for (const Batch& batch : batches) {
    const at::Tensor target = hashes_.narrow(0, batch.begin, batch.end - batch.begin);
    const at::Device where = items_[static_cast<size_t>(batch.begin)].data.device();
    if (where == device_) {
      batch.hashes.compute(target);
    } else {
      const at::Tensor there = at::empty(target.sizes(), target.options().device(where));
      batch.hashes.compute(there);
      target.copy_(there);
    }
  }
}

void ReplicaHashes::before_update() {
  const at::NoGradGuard no_grad;
  // The previous comparison may not have been read yet.
  hashes_ = at::zeros_like(hashes_);
  compute(before_);
}

void ReplicaHashes::join(at::Tensor extremes, const ProcessGroup& group,
                         const at::Tensor& chosen) const {
  if (chosen.numel() == extremes.size(1)) return group.all_reduce(extremes, ReduceOp::kMax)->wait();
  at::Tensor part = extremes.index_select(1, chosen);
  group.all_reduce(part, ReduceOp::kMax)->wait();
  extremes.index_copy_(1, chosen, part);
}

at::Tensor ReplicaHashes::after_update(int64_t iteration) {
  const at::NoGradGuard no_grad;
  compute(after_);
  // The largest hash, and the largest complement, which is the complement of the smallest hash.
  at::Tensor extremes = at::stack({hashes_, hashes_.bitwise_not()});
  for (const auto& [group, chosen] : joins_) join(extremes, *group, chosen);
  const at::Tensor differs = extremes[0].ne(extremes[1].bitwise_not());
  latest_.push_back({iteration, hashes_, differs});
  if (latest_.size() > 2) {
    agreed_ = latest_.front().iteration;  // or the run would have ended
    latest_.pop_front();
  }
  return differs.any().to(at::kLong).reshape({1});
}

std::string ReplicaHashes::describe(int64_t iteration) const {
  const auto found = std::find_if(latest_.begin(), latest_.end(), [&](const Comparison& one) {
    return one.iteration == iteration;
  });
  MEGATRON_ASSERT(found != latest_.end(), "no comparison of iteration ", iteration, " is kept");
  const at::Tensor hashes = found->hashes.cpu(), differs = found->differs.cpu();
  std::ostringstream mine;
  size_t reported = 0;
  for (size_t i = 0; i < items_.size() && reported < kMostReported; ++i) {
    if (!differs.const_data_ptr<bool>()[i]) continue;
    mine << items_[i].key << '\t' << norm_group({}, groups_).rank() << '\t'
         << hashes.const_data_ptr<int64_t>()[i] << '\n';
    ++reported;
  }
  const std::vector<std::string> texts = gather_texts(world_, device_, mine.str());
  std::map<std::string, Copies> copies;
  std::vector<std::string> order;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    for (std::string line; std::getline(lines, line);) {
      const size_t first = line.find('\t'), second = line.rfind('\t');
      Copies& known = copies[line.substr(0, first)];
      if (known.empty()) order.push_back(line.substr(0, first));
      known.push_back({static_cast<int>(rank), line.substr(first + 1, second - first - 1),
                       line.substr(second + 1)});
    }
  }
  std::vector<Verdict> verdicts;
  for (const std::string& key : order)
    verdicts.push_back(verdict_of_data_ranks(key.substr(0, key.find('|')), copies[key]));
  std::stable_partition(verdicts.begin(), verdicts.end(),
                        [](const Verdict& one) { return one.majority; });
  constexpr size_t kVerdicts = 4;
  std::string text =
      cat("iteration ", iteration, ": ranks that hold copies of the same tensors differ");
  for (size_t i = 0; i < std::min(verdicts.size(), kVerdicts); ++i)
    text += (i == 0 ? ": " : "; ") + verdicts[i].text;
  if (verdicts.size() > kVerdicts)
    text += cat("; and ", verdicts.size() - kVerdicts, " more tensors");
  const int64_t before = found == latest_.begin() ? agreed_ : latest_.front().iteration;
  return text + (before > 0 ? cat("\nhint: they were equal at iteration ", before,
                                  "; a checkpoint from before it holds none of this: --ckpt-step")
                            : std::string("\nhint: this is the first comparison of this run; a "
                                          "checkpoint that it saved may hold some of this"));
}

}  // namespace megatron
