#include "megatron/training/proving/proof_buckets.h"

#include <algorithm>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

constexpr int64_t kBuckets = 3;

LayoutPlan plan_of(const Arguments& arguments) {
  return make_layout_plan(arguments, likely_vocabulary(arguments), /*on_gpu=*/false,
                          find_task(arguments).model_provider);
}

// With the steps of the tiny run: what they are does not matter, a long schedule takes time.
LayoutPlan plan_of_model(Arguments model, const Arguments& tiny) {
  model.training = tiny.training;
  model.training.step_batch_size_schedule.clear();
  model.training.global_batch_size = model.training.micro_batch_size *
                                     tiny.microbatches().num_microbatches(0) *
                                     model.data_parallel_size();
  return plan_of(model);
}

// Buckets that fill one after the other; a tied table, and what keeps fp32, have theirs in any
// model.
int64_t num_buckets(const BufferLayout& layout) {
  return std::ranges::count_if(layout.buckets, [](const BufferBucket& bucket) {
    return !bucket.frozen && !bucket.own && !bucket.wide;
  });
}

struct ChunkBuckets {
  const PlannedBuffer* tiny = nullptr;
  int64_t wanted = 0;
};

// Those of all chunks and reduction domains, of encoders with ranks of their own as well.
std::vector<ChunkBuckets> chunk_buckets(const LayoutPlan& model, const LayoutPlan& tiny) {
  std::vector<ChunkBuckets> all;
  if (tiny.encoders != nullptr) all = chunk_buckets(*model.encoders, *tiny.encoders);
  for (int stage = 0; stage < static_cast<int>(tiny.pipeline); ++stage)
    for (int chunk = 0; chunk < tiny.stages.num_chunks(); ++chunk) {
      const std::vector<PlannedBuffer>& before = model.buffers(stage, chunk);
      const std::vector<PlannedBuffer>& after = tiny.buffers(stage, chunk);
      for (size_t i = 0; i < std::min(before.size(), after.size()); ++i)
        all.push_back({&after[i], std::min(kBuckets, num_buckets(before[i].layout))});
    }
  return all;
}

// How many buckets of `chunks` are missing with this configuration.
int64_t missing_buckets(const std::vector<ChunkBuckets>& chunks,
                        const DistributedDataParallelConfig& config) {
  int64_t missing = 0;
  for (const ChunkBuckets& chunk : chunks) {
    const DataSharding& sharding = chunk.tiny->sharding;
    const BufferLayout layout =
        plan_buffer_of(chunk.tiny->parameters, static_cast<int>(sharding.shards),
                       static_cast<int>(sharding.replicas()), config, sizeof(float));
    missing += std::max<int64_t>(0, chunk.wanted - num_buckets(layout));
  }
  return missing;
}

}  // namespace

void shrink_buckets(const Arguments& model, Arguments& tiny, Shrinker& shrinker) {
  // Then a bucket is a layer in every model, or nothing is summed.
  if (model.ddp.strategy() == ShardingStrategy::kOptimGradsParams ||
      (tiny.data_parallel_size() * tiny.parallel.context_parallel_size == 1 &&
       tiny.encoder_ranks().data <= 1))
    return;
  const LayoutPlan before = plan_of_model(model, tiny), after = plan_of(tiny);
  const std::vector<ChunkBuckets> chunks = chunk_buckets(before, after);
  DistributedDataParallelConfig config = tiny.ddp;
  config.whole_matrices = update_rule(tiny.optimizer).needs_whole_matrices();
  int64_t missing = missing_buckets(chunks, config), chosen = 0, elements = 0;
  for (const ChunkBuckets& chunk : chunks)
    elements = std::max(elements, chunk.tiny->layout.num_trained_elements);
  config.ddp_num_buckets.reset();
  for (int64_t size = elements / kBuckets; missing > 0 && size > 0; size = size * 3 / 4) {
    config.ddp_bucket_size = size;
    const int64_t then = missing_buckets(chunks, config);
    if (then >= missing) continue;
    missing = then;
    chosen = size;
  }
  if (chosen > 0) {
    tiny.ddp.ddp_num_buckets.reset();
    shrinker.set("--ddp-bucket-size", tiny.ddp.ddp_bucket_size, chosen);
  }
  int64_t wanted = 0;
  for (const ChunkBuckets& chunk : chunks) wanted += chunk.wanted;
  if (missing > 0)
    shrinker.lose(cat(wanted - missing, " gradient buckets, of each model chunk at most ", kBuckets,
                      ", ", wanted, " in the model"));
}

}  // namespace megatron
