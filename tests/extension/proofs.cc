#include "proofs.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/planning/memory_estimate.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/allocation_meter.h"

namespace megatron {
namespace {

constexpr int kSteps = 5;
constexpr double kTolerance = 1e-10;

// The most that a rank allocates from building its model to the end of its second step.
int64_t metered_peak(const Arguments& arguments, const ParallelGroups& groups) {
  const PretrainTask task = find_task(arguments);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
  const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);
  const auto loader = make_train_loader(arguments, groups, datasets.train, 0, at::kCPU);
  BatchMaker batches(at::kCPU, groups.cp, unpadded_row_multiple(arguments));
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  TrainedModel model = build_model(task, arguments, vocabulary_of(arguments, *tokenizer), groups,
                                   model_dtype(arguments.optimizer), at::kCPU, StartPoint{});
  meter->most = meter->live;  // initialisation has temporaries of its own
  Timers timers(0);
  const StepOptions options = step_options(arguments, 0);
  for (int step = 0; step < 2; ++step) {
    const at::Tensor totals = accumulate_gradients(
        model, task, options, [&] { return batches.make(loader->next()); }, timers);
    batches.take_held();
    update_weights(model, options, totals);
  }
  return meter->most;
}

}  // namespace

std::vector<ProvedLayout> proved_layouts() {
  return {
      {"tp2_sp", 2, "--tensor-model-parallel-size 2 --sequence-parallel"},
      {"pp2", 2, "--pipeline-model-parallel-size 2"},
      {"pp2_vpp2", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"},
      {"dp2_zero1", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"},
      {"dp2_zero3", 2,
       "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
       "--overlap-grad-reduce --overlap-param-gather"},
      {"cp2", 2, "--context-parallel-size 2"},
      {"tp2_sp_pp2_dp2_zero1", 8,
       "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
       "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"},
  };
}

std::string differences_in_fp64(const std::string& flags, int ranks) {
  const Arguments arguments = parse_run(flags, ranks);
  return differences_from_one_rank(arguments, at::kDouble, kTolerance, kSteps,
                                   arguments.training.task);
}

std::string unproved(const std::string& flags, int ranks) {
  const Arguments arguments = parse_run(flags, ranks);
  std::string text;
  for (const Proof& proof :
       prove(find_task(arguments), shrink(arguments, /*max_axis=*/2, kSteps).arguments, kSteps)) {
    for (const std::string& fault : proof.faults) text += cat(proof.dtype, " ", fault, "\n");
    for (const ProofLine& line : proof.lines) {
      // Weights are compared in fp64 alone.
      if (line.failed == 0 && (line.compared > 0 || proof.dtype != "fp64")) continue;
      text += cat(proof.dtype, " ", line.quantity, ": ", line.failed, " of ", line.compared,
                  " differ, ", line.worst, ": ", line.difference, " > ", line.allowed, "\n");
    }
  }
  return text;
}

std::vector<RankMemory> memory_of_ranks(const std::string& flags, int ranks) {
  Arguments arguments = parse_run(flags, ranks);
  // The plan is that of processes, which have no mailbox on CPUs; threads would have one.
  if (arguments.parallel.sequence_parallel) arguments.ddp.peer_copies = false;
  const auto tokenizer = make_tokenizer(arguments.tokenizer);
  const LayoutPlan plan = make_layout_plan(arguments, vocabulary_of(arguments, *tokenizer),
                                           /*on_gpu=*/false, find_task(arguments).model_provider);
  std::vector<RankMemory> all(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(arguments.parallel, world);
    RankMemory& memory = all[static_cast<size_t>(world->rank())];
    memory.metered = metered_peak(arguments, groups);
    memory.planned = stage_memory(plan, groups.pp.rank()).allocated();
  });
  return all;
}

}  // namespace megatron
