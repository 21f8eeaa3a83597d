#include "megatron/comm/parallel_groups.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/comm/peer_mailbox.h"

namespace megatron {
namespace {

std::vector<std::string> split_axes(const std::string& text) {
  std::vector<std::string> axes;
  std::istringstream in(text);
  for (std::string axis; std::getline(in, axis, '-');) axes.push_back(axis);
  return axes;
}

void refuse_below_one(const char* flag, int64_t value, Violations& violations) {
  if (value < 1) violations.add(cat(flag, " is ", value), "a positive number");
}

// Blocks of 1, 2, 4, ... consecutive ranks.
std::vector<ProcessGroup> make_widths(const ProcessGroup& dp_cp) {
  std::vector<ProcessGroup> widths;
  for (int width = 1; width <= dp_cp.size(); width *= 2) {
    const int first = dp_cp.rank() / width * width;
    std::vector<int> ranks(static_cast<size_t>(width));
    std::iota(ranks.begin(), ranks.end(), first);
    const bool full = width > 1 && first + width <= dp_cp.size();
    widths.push_back(full ? dp_cp.subgroup(ranks, cat("cp_of_", width)) : ProcessGroup());
  }
  return widths;
}

// The two levels of a context-parallel group: `inner` consecutive ranks, and the ranks with the
// same position in each inner group.
std::vector<ProcessGroup> make_hierarchy(const ProcessGroup& cp,
                                         const std::vector<int64_t>& sizes) {
  if (sizes.empty()) return {};
  MEGATRON_CHECK(sizes.size() == 2 && sizes[0] > 0 && sizes[0] * sizes[1] == cp.size(),
                 "--hierarchical-context-parallel-sizes do not make up ", cp.size(),
                 " context-parallel ranks");
  std::vector<ProcessGroup> levels;
  const std::vector<int> axes = {static_cast<int>(sizes[0]), static_cast<int>(sizes[1])};
  for (const std::string level : {"inner", "outer"}) {
    for (const std::vector<int>& ranks : rank_groups("inner-outer", axes, level))
      if (std::find(ranks.begin(), ranks.end(), cp.rank()) != ranks.end())
        levels.push_back(cp.subgroup(ranks, "cp_" + level));
  }
  return levels;
}

}  // namespace

void ParallelConfig::fields(FieldVisitor& visitor) {
  visitor.group("parallelism");
  visitor.field("tensor_model_parallel_size", tensor_model_parallel_size,
                "ranks that share the matrices of one layer");
  visitor.field("pipeline_model_parallel_size", pipeline_model_parallel_size,
                "ranks that share the layers of one model");
  visitor.field("context_parallel_size", context_parallel_size, "ranks that share one sequence");
  visitor.field("hierarchical_context_parallel_sizes", hierarchical_context_parallel_sizes,
                "inner and outer size of the levels of --cp-comm-type a2a+p2p; their product is "
                "the context-parallel size");
  visitor.field(
      "hybrid_context_parallel", hybrid_context_parallel,
      "give every document as many ranks of data and context as it needs, a power of two");
  visitor.field("max_seqlen_per_dp_cp_rank", max_seqlen_per_dp_cp_rank,
                "most tokens of one document on one rank, with --hybrid-context-parallel");
  visitor.field("expert_model_parallel_size", expert_model_parallel_size,
                "ranks that share the experts of one layer");
  visitor.field("sequence_parallel", sequence_parallel,
                "split norms and dropout along the sequence");
  visitor.field("use_tp_pp_dp_mapping", use_tp_pp_dp_mapping,
                "order ranks tensor, pipeline, data instead of tensor, data, pipeline");
}

void ParallelConfig::validate(Violations& violations) const {
  refuse_below_one("--tensor-model-parallel-size", tensor_model_parallel_size, violations);
  refuse_below_one("--pipeline-model-parallel-size", pipeline_model_parallel_size, violations);
  refuse_below_one("--context-parallel-size", context_parallel_size, violations);
  if (hybrid_context_parallel && !max_seqlen_per_dp_cp_rank)
    violations.add("--hybrid-context-parallel is given without --max-seqlen-per-dp-cp-rank",
                   "how many tokens of one document a rank has memory for");
  if (max_seqlen_per_dp_cp_rank && !hybrid_context_parallel)
    violations.add("--max-seqlen-per-dp-cp-rank has no effect without --hybrid-context-parallel");
  if (max_seqlen_per_dp_cp_rank)
    refuse_below_one("--max-seqlen-per-dp-cp-rank", *max_seqlen_per_dp_cp_rank, violations);
  if (expert_model_parallel_size != 1)
    violations.add(cat("--expert-model-parallel-size ", expert_model_parallel_size,
                       " needs experts, which are not built yet"),
                   "--expert-model-parallel-size 1");
  const std::vector<int64_t>& levels = hierarchical_context_parallel_sizes;
  const bool fits = levels.size() == 2 && levels[0] > 0 && levels[1] > 0 &&
                    levels[0] * levels[1] == context_parallel_size;
  if (!levels.empty() && !fits) {
    std::string text;
    for (int64_t level : levels) text += cat(" ", level);
    violations.add(cat("--hierarchical-context-parallel-sizes", text,
                       " do not make up --context-parallel-size ", context_parallel_size),
                   "two sizes with that product, the inner one first");
  }
}

std::vector<std::vector<int>> rank_groups(const std::string& order, const std::vector<int>& sizes,
                                          const std::string& mask) {
  const std::vector<std::string> axes = split_axes(order);
  const std::vector<std::string> wanted = split_axes(mask);
  MEGATRON_CHECK(axes.size() == sizes.size(), "rank order \"", order, "\" has ", axes.size(),
                 " axes, but ", sizes.size(), " sizes are given");
  for (const std::string& axis : wanted) {
    MEGATRON_CHECK(std::find(axes.begin(), axes.end(), axis) != axes.end(), "axis \"", axis,
                   "\" is not in the rank order \"", order, "\"");
  }
  // Offsets of the members within a group, from the axes in the mask, and of the groups, from the
  // other axes; the leftmost axis varies fastest in both.
  std::vector<int> member_offsets = {0};
  std::vector<int> group_offsets = {0};
  int stride = 1;
  for (size_t a = 0; a < axes.size(); ++a) {
    MEGATRON_CHECK(sizes[a] >= 1, "axis \"", axes[a], "\" has size ", sizes[a],
                   ", expected at least 1");
    const bool masked = std::find(wanted.begin(), wanted.end(), axes[a]) != wanted.end();
    std::vector<int>& offsets = masked ? member_offsets : group_offsets;
    const std::vector<int> before = offsets;
    for (int i = 1; i < sizes[a]; ++i) {
      for (int offset : before) offsets.push_back(offset + i * stride);
    }
    stride *= sizes[a];
  }
  std::vector<std::vector<int>> groups;
  for (int group_offset : group_offsets) {
    std::vector<int>& group = groups.emplace_back();
    for (int member_offset : member_offsets) group.push_back(group_offset + member_offset);
  }
  return groups;
}

int64_t data_parallel_size(const ParallelConfig& config, int64_t world_size) {
  const int64_t model = config.tensor_model_parallel_size * config.pipeline_model_parallel_size *
                        config.context_parallel_size;
  if (world_size % model != 0)
    throw UsageError(cat(world_size, " ranks are not divisible by --tensor-model-parallel-size ",
                         config.tensor_model_parallel_size, " x --pipeline-model-parallel-size ",
                         config.pipeline_model_parallel_size, " x --context-parallel-size ",
                         config.context_parallel_size, " = ", model, "\nhint: start a multiple of ",
                         model, " ranks"));
  return world_size / model;
}

namespace {

// Ranks along the axes of config.order().
std::vector<int> axis_sizes(const ParallelConfig& config, int64_t dp) {
  std::vector<int> sizes;
  for (const std::string& axis : split_axes(config.order())) {
    const int64_t size = axis == "tp"   ? config.tensor_model_parallel_size
                         : axis == "cp" ? config.context_parallel_size
                         : axis == "dp" ? dp
                         : axis == "pp" ? config.pipeline_model_parallel_size
                                        : 1;  // ep does not divide the dense grid
    sizes.push_back(static_cast<int>(size));
  }
  return sizes;
}

}  // namespace

std::string place_in_mesh(const ParallelConfig& config, int rank, int world_size) {
  const std::vector<std::string> axes = split_axes(config.order());
  const std::vector<int> sizes = axis_sizes(config, data_parallel_size(config, world_size));
  std::string text;
  for (size_t i = 0; i < axes.size(); rank /= sizes[i], ++i)
    if (sizes[i] > 1) text += cat(text.empty() ? "" : " ", axes[i], " ", rank % sizes[i]);
  return text;
}

ParallelGroups make_parallel_groups(const ParallelConfig& config,
                                    const std::shared_ptr<Backend>& world,
                                    int64_t num_query_groups) {
  ParallelGroups groups;
  const int64_t dp = data_parallel_size(config, world ? world->size() : 1);
  if (config.hybrid_context_parallel) groups.cp_widths = {ProcessGroup()};
  if (!world || world->size() == 1) return groups;
  groups.world = ProcessGroup(world, "world");
  const int rank = world->rank();
  const std::vector<int> sizes = axis_sizes(config, dp);
  const auto members = [&](const std::string& mask) {
    for (std::vector<int>& group : rank_groups(config.order(), sizes, mask))
      if (std::find(group.begin(), group.end(), rank) != group.end()) return group;
    throw_error(cat("internal error: rank ", rank, " is in no group of ", mask));
  };
  const auto make = [&](const std::string& mask, const std::string& name) {
    return groups.world.subgroup(members(mask), name);
  };
  groups.dp_cp = make("dp-cp", "dp_cp");
  if (config.hybrid_context_parallel) groups.cp_widths = make_widths(groups.dp_cp);
  groups.dp = make("dp", "dp");
  groups.cp = make("cp", "cp");
  groups.cp_hierarchy = make_hierarchy(groups.cp, config.hierarchical_context_parallel_sizes);
  groups.model_parallel = make("tp-pp", "model_parallel");
  groups.tp = make("tp", "tp");
  if (groups.tp.size() > 1) groups.tp_mailbox = std::make_shared<PeerMailbox>(groups.tp);
  groups.pp = make("pp", "pp");
  const int64_t sharing =
      config.tensor_model_parallel_size / std::max<int64_t>(num_query_groups, 1);
  if (sharing > 1) {
    std::vector<int> ranks(sharing);
    std::iota(ranks.begin(), ranks.end(),
              groups.tp.rank() / static_cast<int>(sharing) * static_cast<int>(sharing));
    groups.kv = groups.tp.subgroup(ranks, "kv");
  }
  const std::vector<int> stages = members("pp");
  if (stages.size() > 1 && (rank == stages.front() || rank == stages.back()))
    groups.embd = groups.world.subgroup({stages.front(), stages.back()}, "embd");
  return groups;
}

}  // namespace megatron
