#include "megatron/comm/mesh.h"

#include <numeric>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::pair<Axis, const char*> kNames[] = {
    {Axis::kTensor, "tp"},        {Axis::kData, "dp"},   {Axis::kContext, "cp"},
    {Axis::kExpertTensor, "etp"}, {Axis::kExpert, "ep"}, {Axis::kExpertData, "edp"},
    {Axis::kPipeline, "pp"},
};

const char* name_of(Axis axis) {
  for (const auto& [known, name] : kNames)
    if (known == axis) return name;
  return "?";
}

}  // namespace

std::string axes_text(AxisSet axes) {
  std::string text;
  for (const auto& [axis, name] : kNames)
    if (axes.contains(axis)) text += cat(text.empty() ? "" : "-", name);
  return text;
}

Mesh::Mesh(const MeshSizes& s) {
  const auto grid = [&](std::vector<std::pair<Axis, int64_t>> sizes) {
    sizes.insert(s.pipeline_before_data ? sizes.end() - 1 : sizes.end(),
                 {Axis::kPipeline, s.pipeline});
    return make_grid(sizes);
  };
  dense_ = grid({{Axis::kTensor, s.tensor}, {Axis::kContext, s.context}, {Axis::kData, s.data}});
  const int64_t stage = s.tensor * s.context * s.data, divided = s.expert_tensor * s.expert;
  MEGATRON_CHECK(divided >= 1 && stage % divided == 0, stage,
                 " ranks per pipeline stage are not divisible by expert-tensor-parallel size ",
                 s.expert_tensor, " x expert-parallel size ", s.expert);
  const int64_t expert_data = stage / divided;
  // Otherwise the stages of one pipeline would be other ranks for experts than for other weights.
  if (s.pipeline_before_data && expert_data != s.data) {
    no_experts_ =
        cat("expert-tensor-parallel size ", s.expert_tensor, " x expert-parallel size ", s.expert,
            " differs from tensor-parallel size ", s.tensor, " x context-parallel size ", s.context,
            ", which the rank order tensor, pipeline, data requires to be equal");
    const bool by_default = s.expert_tensor == 1 || s.expert_tensor == s.tensor;
    MEGATRON_CHECK(s.expert == 1 && by_default, no_experts_);
    return;
  }
  expert_ = grid({{Axis::kExpertTensor, s.expert_tensor},
                  {Axis::kExpert, s.expert},
                  {Axis::kExpertData, expert_data}});
}

Mesh::Grid Mesh::make_grid(const std::vector<std::pair<Axis, int64_t>>& sizes) {
  Grid grid;
  int stride = 1;
  for (const auto& [axis, size] : sizes) {
    MEGATRON_CHECK(size >= 1, "axis \"", name_of(axis), "\" has size ", size,
                   ", expected at least 1");
    grid.push_back({axis, static_cast<int>(size), stride});
    stride *= static_cast<int>(size);
  }
  return grid;
}

const Mesh::Grid& Mesh::grid_of(AxisSet axes) const {
  for (const Grid* grid : {&dense_, &expert_}) {
    AxisSet others = axes;
    for (const Dimension& dimension : *grid) others.erase(dimension.axis);
    if (others.empty()) return *grid;
  }
  MEGATRON_CHECK(no_experts_.empty(), no_experts_);
  fail_invariant("axes of one grid", std::source_location::current(),
                 cat("axes ", axes_text(axes), " lie in two grids"));
}

int Mesh::world_size() const { return dense_.back().stride * dense_.back().size; }

int Mesh::group_size(AxisSet axes) const {
  int size = 1;
  for (const Dimension& d : grid_of(axes))
    if (axes.contains(d.axis)) size *= d.size;
  return size;
}

int Mesh::rank_in_group(int rank, AxisSet axes) const {
  int place = 0, size = 1;
  for (const Dimension& d : grid_of(axes)) {
    if (!axes.contains(d.axis)) continue;
    place += rank / d.stride % d.size * size;
    size *= d.size;
  }
  return place;
}

int Mesh::rank_at(AxisSet axes, int place) const {
  MEGATRON_ASSERT(place >= 0 && place < group_size(axes), "place ", place, " along ",
                  axes_text(axes));
  int rank = 0;
  for (const Dimension& d : grid_of(axes)) {
    if (!axes.contains(d.axis)) continue;
    rank += place % d.size * d.stride;
    place /= d.size;
  }
  return rank;
}

std::vector<int> Mesh::group(int rank, AxisSet axes) const {
  const int first = rank - rank_at(axes, rank_in_group(rank, axes));
  std::vector<int> ranks;
  for (int place = 0; place < group_size(axes); ++place)
    ranks.push_back(first + rank_at(axes, place));
  return ranks;
}

std::string Mesh::place_text(int rank) const {
  std::string text;
  for (const Dimension& d : dense_) {
    if (d.size == 1) continue;
    text += cat(text.empty() ? "" : " ", name_of(d.axis), " ", rank_in_group(rank, {d.axis}));
  }
  return text;
}

std::vector<int> block_of(int rank, int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), rank / size * size);
  return ranks;
}

std::vector<int> across_blocks(int rank, int size, int ranks) {
  std::vector<int> places;
  for (int place = rank % size; place < ranks; place += size) places.push_back(place);
  return places;
}

}  // namespace megatron
