#include "megatron/comm/modules/encoder_ranks.h"

#include <numeric>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t ranks_behind(const EncoderRanks& encoder, int64_t world_size) {
  if (encoder.count() >= world_size)
    throw UsageError(cat(world_size, " ranks, of which encoders take ", encoder.count(),
                         ", leave none for the language model\nhint: start more ranks"));
  return world_size - encoder.count();
}

ParallelConfig encoder_config(const EncoderRanks& encoder) {
  ParallelConfig config;
  config.tensor_model_parallel_size = encoder.tensor;
  return config;
}

}  // namespace

int64_t data_parallel_size(const ParallelConfig& config, const EncoderRanks& encoder,
                           int64_t world_size) {
  return data_parallel_size(config, ranks_behind(encoder, world_size));
}

Mesh make_mesh(const ParallelConfig& config, const EncoderRanks& encoder, int64_t world_size) {
  return make_mesh(config, ranks_behind(encoder, world_size));
}

std::string place_in_mesh(const ParallelConfig& config, const EncoderRanks& encoder, int rank,
                          int world_size) {
  const int first = static_cast<int>(encoder.count());
  if (!encoder.holds(rank)) return place_in_mesh(config, rank - first, world_size - first);
  const std::string place = place_in_mesh(encoder_config(encoder), rank, first);
  return cat("encoder", place.empty() ? "" : " ", place);
}

ParallelGroups make_parallel_groups(const ParallelConfig& config, const EncoderRanks& encoder,
                                    const std::shared_ptr<Backend>& world) {
  if (!encoder.any()) return make_parallel_groups(config, world);
  MEGATRON_ASSERT(world != nullptr, "encoders with ranks of their own in a job of one rank");
  const bool encodes = encoder.holds(world->rank());
  const auto behind = static_cast<size_t>(ranks_behind(encoder, world->size()));
  const auto count = static_cast<size_t>(encoder.count());
  std::vector<int> ranks(encodes ? count : behind);
  std::iota(ranks.begin(), ranks.end(), encodes ? 0 : static_cast<int>(count));
  const std::shared_ptr<Backend> own =
      ranks.size() > 1 ? world->subgroup(ranks, encodes ? "encoders" : "language model",
                                         CommunicatorUse::kExclusive)
                       : nullptr;
  ParallelGroups groups = make_parallel_groups(encodes ? encoder_config(encoder) : config, own);
  groups.world = ProcessGroup(world, "world");
  return groups;
}

void sum_over_modules(const at::Tensor& values, const ParallelGroups& groups) {
  const int of_module = groups.model_parallel.size() * groups.dp_cp.size();
  if (groups.world.size() <= of_module) return;  // hand-made groups may have no world
  const bool counts = groups.model_parallel.rank() == 0 && groups.dp_cp.rank() == 0;
  if (!counts) values.zero_();
  groups.world.all_reduce(values)->wait();
}

}  // namespace megatron
