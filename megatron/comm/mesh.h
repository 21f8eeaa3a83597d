// The mesh: how the ranks of a job are arranged along axes, as plain numbers. The only place with
// rank arithmetic. Planners ask it for any number of ranks; ParallelGroups connects the groups that
// it lists.
//
// The same ranks form two grids. The weights of experts are divided over the second one, all other
// weights over the first. World rank, lower case being the place along an axis and upper case its
// size (Megatron's order, leftmost fastest; with pipeline_before_data the last two are swapped):
//
//   dense    tp  + TP  * (cp + CP * (dp  + DP  * pp))
//   experts  etp + ETP * (ep + EP * (edp + EDP * pp))
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace megatron {

// kExpert: ranks that hold different experts. kExpertTensor and kExpertData: what kTensor and kData
// (with kContext) are to other weights. kPipeline is in both grids. kModel stands for kTensor and
// kPipeline together: the tensor ranks of all stages, those of one stage being neighbours.
enum class Axis : uint8_t {
  kTensor,
  kContext,
  kData,
  kPipeline,
  kExpert,
  kExpertTensor,
  kExpertData,
  kModel
};

// A set of mesh axes.
struct AxisSet {
  uint32_t bits = 0;
  constexpr AxisSet() = default;
  constexpr AxisSet(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) insert(axis);
  }
  constexpr void insert(Axis axis) { bits |= bits_of(axis); }
  constexpr void erase(Axis axis) { bits &= ~bits_of(axis); }
  constexpr bool contains(Axis axis) const { return (bits & bits_of(axis)) == bits_of(axis); }
  constexpr bool empty() const { return bits == 0; }
  // Some of them are only in the grid of experts.
  constexpr bool of_experts() const {
    return contains(Axis::kExpert) || contains(Axis::kExpertTensor) || contains(Axis::kExpertData);
  }
  constexpr bool operator==(const AxisSet&) const = default;

 private:
  static constexpr uint32_t bits_of(Axis axis) {
    if (axis == Axis::kModel) return bits_of(Axis::kTensor) | bits_of(Axis::kPipeline);
    return 1u << static_cast<uint32_t>(axis);
  }
};

// "dp-cp": Megatron's names, for messages.
std::string axes_text(AxisSet axes);

// Ranks along each axis; those of kExpertData follow.
struct MeshSizes {
  int64_t tensor = 1, context = 1, data = 1, pipeline = 1;
  int64_t expert = 1, expert_tensor = 1;
  bool pipeline_before_data = false;
};

// A set of axes must lie in one of the grids; of an empty set every group is one rank.
class Mesh {
 public:
  Mesh() : Mesh(MeshSizes{}) {}
  // Throws Error when a size is below one or the grids do not fit each other. With expert sizes
  // left at their defaults a model may have no experts: then only no_experts() says why they do not
  // fit, and whoever asks for their axes gets that as an Error.
  explicit Mesh(const MeshSizes& sizes);

  const std::string& no_experts() const { return no_experts_; }  // empty: experts have a grid

  int world_size() const;
  // Ranks of one group along the axes, and how many such groups there are.
  int group_size(AxisSet axes) const;
  int num_groups(AxisSet axes) const { return world_size() / group_size(axes); }
  // The place of a rank of the world in its group along the axes.
  int rank_in_group(int rank, AxisSet axes) const;
  // The ranks of the world in that group, in ascending order.
  std::vector<int> group(int rank, AxisSet axes) const;
  // The rank of the world at this place along the axes, and at place 0 along the others of the
  // grid. A rank is the sum of those of sets that share no axis.
  int rank_at(AxisSet axes, int place) const;
  // Where a rank is, "tp 1 dp 0 pp 2": the dense axes with several ranks.
  std::string place_text(int rank) const;

 private:
  struct Dimension {
    Axis axis;
    int size;
    int stride;  // in ranks of the world
  };
  using Grid = std::vector<Dimension>;  // the fastest first

  static Grid make_grid(const std::vector<std::pair<Axis, int64_t>>& sizes);
  const Grid& grid_of(AxisSet axes) const;

  Grid dense_, expert_;
  std::string no_experts_;
};

// The ranks of a group in blocks of `size` neighbours: those of the block of `rank`, and those at
// its place in every block of a group of `ranks`.
std::vector<int> block_of(int rank, int size);
std::vector<int> across_blocks(int rank, int size, int ranks);

}  // namespace megatron
