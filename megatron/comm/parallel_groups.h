// The groups of ranks along the axes of the mesh (comm/mesh.h), built once and passed down.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/comm/mesh.h"
#include "megatron/comm/process_group.h"

namespace megatron {

struct ParallelConfig : Config {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  std::vector<int64_t> hierarchical_context_parallel_sizes;  // {inner, outer}; empty: one level
  // Each document uses as many ranks of the data x context grid as it needs to keep within the
  // maximum number of tokens per rank.
  bool hybrid_context_parallel = false;
  std::optional<int64_t> max_seqlen_per_dp_cp_rank;
  int64_t expert_model_parallel_size = 1;
  std::optional<int64_t> expert_tensor_parallel_size;  // none: tensor_model_parallel_size
  bool sequence_parallel = false;
  bool use_tp_pp_dp_mapping = false;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  int64_t expert_tensor_size() const {
    return expert_tensor_parallel_size.value_or(tensor_model_parallel_size);
  }
};

// The groups this rank belongs to. Default-constructed: one rank.
struct ParallelGroups {
  ProcessGroup world;
  ProcessGroup tp;
  ProcessGroup pp;  // stages of one pipeline
  ProcessGroup dp;  // ranks that read different samples
  ProcessGroup cp;  // ranks that hold different parts of the same sequences
  // cp as two levels, inner first: consecutive ranks, and ranks with equal positions in the inner
  // groups; empty without hierarchical_context_parallel_sizes
  std::vector<ProcessGroup> cp_hierarchy;
  std::vector<ProcessGroup>
      cp_widths;  // with hybrid_context_parallel: this rank's blocks of 1, 2, 4, ... neighbours of
                  // dp_cp; of one rank where the last block would not be full
  ProcessGroup dp_cp;           // ranks that hold different tokens of the same weights
  ProcessGroup model_parallel;  // tp and pp: ranks that hold different parts of one model replica
  // First and last stage of one pipeline; on the stages between, this rank alone
  ProcessGroup embd;
  ProcessGroup ep;                     // ranks that hold different experts
  ProcessGroup etp;                    // as tp, of an expert
  ProcessGroup ep_etp;                 // both: ranks that hold one set of experts
  ProcessGroup edp;                    // as dp_cp, of an expert
  ProcessGroup expert_model_parallel;  // as model_parallel, of experts: etp, ep and pp
  std::string no_experts;              // Mesh::no_experts(): the last five are then of no use

  // The sets of axes along which there is a group above: of dense weights, then of experts.
  static std::vector<AxisSet> axes();
  // The group along one of these sets; of no axis: this rank alone. Throws Error
  // for axes of experts if the mesh has none.
  const ProcessGroup& group(AxisSet axes) const;
  // This rank's block of `size` neighbours of that group, which `size` must divide. Made by the
  // first call with this name; the ranks of a block make their groups in the same order.
  const ProcessGroup& block(AxisSet axes, int size, const std::string& name) const;
  // These stages of this rank's pipeline, ascending, its own among them. Made by the first call for
  // a set of stages, which all of them make in the same order.
  const ProcessGroup& stages(const std::vector<int>& stages) const;

 private:
  std::shared_ptr<std::map<std::string, ProcessGroup>> blocks_ =
      std::make_shared<std::map<std::string, ProcessGroup>>();
};

// Sizes derived from a configuration and a number of ranks. Throws UsageError if they do not divide
// evenly.
int64_t data_parallel_size(const ParallelConfig& config, int64_t world_size);

// The mesh of a configuration and a number of ranks. Throws UsageError or Error when sizes do not
// divide.
Mesh make_mesh(const ParallelConfig& config, int64_t world_size);

// Where a rank is, "tp 1 pp 2 dp 0": the axes with several ranks.
std::string place_in_mesh(const ParallelConfig& config, int rank, int world_size);

// Builds this rank's groups of `world`; every rank calls it with an equal configuration.
ParallelGroups make_parallel_groups(const ParallelConfig& config,
                                    const std::shared_ptr<Backend>& world);

}  // namespace megatron
