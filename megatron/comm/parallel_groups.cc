#include "megatron/comm/parallel_groups.h"

#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

void refuse_below_one(const char* flag, int64_t value, Violations& violations) {
  if (value < 1) violations.add(cat(flag, " is ", value), "a positive number");
}

// Blocks of 1, 2, 4, ... consecutive ranks.
std::vector<ProcessGroup> make_widths(const ProcessGroup& dp_cp) {
  std::vector<ProcessGroup> widths;
  for (int width = 1; width <= dp_cp.size(); width *= 2) {
    const std::vector<int> ranks = block_of(dp_cp.rank(), width);
    const bool full = width > 1 && ranks.back() < dp_cp.size();
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
  const int inner = static_cast<int>(sizes[0]);
  return {cp.subgroup(block_of(cp.rank(), inner), "cp_inner"),
          cp.subgroup(across_blocks(cp.rank(), inner, cp.size()), "cp_outer")};
}

}  // namespace

void ParallelConfig::fields(FieldVisitor& visitor) {
  visitor.role(FieldRole::kMachine);
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
  visitor.field("expert_tensor_parallel_size", expert_tensor_parallel_size,
                "ranks that share the matrices of one expert; default: "
                "--tensor-model-parallel-size");
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
  refuse_below_one("--expert-model-parallel-size", expert_model_parallel_size, violations);
  if (expert_tensor_parallel_size)
    refuse_below_one("--expert-tensor-parallel-size", *expert_tensor_parallel_size, violations);
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

const ProcessGroup& ParallelGroups::block(AxisSet axes, int size, const std::string& name) const {
  const ProcessGroup& all = group(axes);
  MEGATRON_ASSERT(size >= 1 && all.size() % size == 0, "blocks of ", size, " of ", all.size(),
                  " ranks along ", axes_text(axes));
  const auto [made, is_new] = blocks_->try_emplace(cat(axes_text(axes), "/", size, "/", name));
  if (is_new) made->second = all.subgroup(block_of(all.rank(), size), name);
  return made->second;
}

const ProcessGroup& ParallelGroups::stages(const std::vector<int>& stages) const {
  if (stages.size() == 2 && stages.front() == 0 && stages.back() == pp.size() - 1) return embd;
  std::string name = "stages";
  for (const int stage : stages) name += cat(" ", stage);
  const auto [made, is_new] = blocks_->try_emplace(name);
  if (is_new) made->second = pp.subgroup(stages, name);
  return made->second;
}

Mesh make_mesh(const ParallelConfig& config, int64_t world_size) {
  MeshSizes sizes;
  sizes.tensor = config.tensor_model_parallel_size;
  sizes.expert_tensor = config.expert_tensor_size();
  sizes.context = config.context_parallel_size;
  sizes.data = data_parallel_size(config, world_size);
  sizes.pipeline = config.pipeline_model_parallel_size;
  sizes.expert = config.expert_model_parallel_size;
  sizes.pipeline_before_data = config.use_tp_pp_dp_mapping;
  return Mesh(sizes);
}

std::string place_in_mesh(const ParallelConfig& config, int rank, int world_size) {
  return make_mesh(config, world_size).place_text(rank);
}

namespace {

constexpr std::pair<AxisSet, ProcessGroup ParallelGroups::*> kGroups[] = {
    {{Axis::kTensor}, &ParallelGroups::tp},
    {{Axis::kContext}, &ParallelGroups::cp},
    {{Axis::kData}, &ParallelGroups::dp},
    {{Axis::kData, Axis::kContext}, &ParallelGroups::dp_cp},
    {{Axis::kPipeline}, &ParallelGroups::pp},
    {{Axis::kTensor, Axis::kPipeline}, &ParallelGroups::model_parallel},
    {{Axis::kExpert}, &ParallelGroups::ep},
    {{Axis::kExpertTensor}, &ParallelGroups::etp},
    {{Axis::kExpertData}, &ParallelGroups::edp},
    {{Axis::kExpertTensor, Axis::kExpert}, &ParallelGroups::ep_etp},
    {{Axis::kExpertTensor, Axis::kExpert, Axis::kPipeline}, &ParallelGroups::expert_model_parallel},
};

}  // namespace

std::vector<AxisSet> ParallelGroups::axes() {
  std::vector<AxisSet> all;
  for (const auto& [axes, member] : kGroups) all.push_back(axes);
  return all;
}

const ProcessGroup& ParallelGroups::group(AxisSet axes) const {
  static const ProcessGroup alone;
  if (axes.empty()) return alone;
  MEGATRON_CHECK(!axes.of_experts() || no_experts.empty(), no_experts);
  for (const auto& [known, member] : kGroups)
    if (known == axes) return this->*member;
  fail_invariant("a known set of axes", std::source_location::current(),
                 cat("no group is made along ", axes_text(axes)));
}

ParallelGroups make_parallel_groups(const ParallelConfig& config,
                                    const std::shared_ptr<Backend>& world) {
  ParallelGroups groups;
  const Mesh mesh = make_mesh(config, world ? world->size() : 1);
  if (config.hybrid_context_parallel) groups.cp_widths = {ProcessGroup()};
  if (!world || world->size() == 1) return groups;
  groups.world = ProcessGroup(world, "world");
  const int rank = world->rank();
  const auto make = [&](AxisSet axes, const std::string& name) {
    return groups.world.subgroup(mesh.group(rank, axes), name);
  };
  groups.dp_cp = make({Axis::kData, Axis::kContext}, "dp_cp");
  if (config.hybrid_context_parallel) groups.cp_widths = make_widths(groups.dp_cp);
  groups.dp = make({Axis::kData}, "dp");
  groups.cp = make({Axis::kContext}, "cp");
  groups.cp_hierarchy = make_hierarchy(groups.cp, config.hierarchical_context_parallel_sizes);
  groups.model_parallel = make({Axis::kModel}, "model_parallel");
  groups.tp = make({Axis::kTensor}, "tp");
  groups.pp = make({Axis::kPipeline}, "pp");
  const std::vector<int> stages = mesh.group(rank, {Axis::kPipeline});
  if (stages.size() > 1 && (rank == stages.front() || rank == stages.back()))
    groups.embd = groups.world.subgroup({stages.front(), stages.back()}, "embd");
  // A group of the grid of experts with the ranks of a dense group is that group: without expert
  // parallelism nothing is made here.
  groups.no_experts = mesh.no_experts();
  const bool experts = groups.no_experts.empty();
  const auto make_expert = [&](AxisSet axes, const std::string& name, AxisSet dense) {
    return !experts || mesh.group(rank, axes) == mesh.group(rank, dense) ? groups.group(dense)
                                                                         : make(axes, name);
  };
  if (experts) groups.ep = make({Axis::kExpert}, "ep");
  groups.etp = make_expert({Axis::kExpertTensor}, "etp", {Axis::kTensor});
  groups.edp = make_expert({Axis::kExpertData}, "edp", {Axis::kData, Axis::kContext});
  groups.ep_etp = make_expert({Axis::kExpertTensor, Axis::kExpert}, "ep_etp", {Axis::kTensor});
  groups.expert_model_parallel = make_expert({Axis::kExpertTensor, Axis::kExpert, Axis::kPipeline},
                                             "expert_model_parallel", {Axis::kModel});
  return groups;
}

}  // namespace megatron
