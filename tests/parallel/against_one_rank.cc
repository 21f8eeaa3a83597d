#include "against_one_rank.h"

#include <algorithm>
#include <map>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"

namespace megatron {

Arguments parse_run(const std::string& flags, int world_size) {
  return parse_line("pretrain " + flags, world_size);
}

std::string differences_from_one_rank(const Arguments& arguments, c10::ScalarType dtype,
                                      double rtol, int steps, const std::string& name,
                                      bool updates) {
  static std::map<std::string, TrainingTrace> references;
  const PretrainTask task = find_task(name, arguments);
  const Arguments one = serial_arguments(arguments);
  TraceOptions options = {dtype, steps, updates};
  TrainingTrace& reference =
      references[cat(name, " ", dtype, " ", steps, " ", updates, " ", resolved_yaml(one))];
  if (reference.steps.empty()) reference = trace_training(task, one, options);
  const TrainingTrace trace = trace_training(task, arguments, options);
  std::vector<Comparison> comparisons = compare_traces(trace, reference, rtol);
  if (dtype == at::kDouble && updates && !std::ranges::all_of(comparisons, &Comparison::holds)) {
    options.disturbance = kRoundingOfWeights;
    allow_grown_rounding(comparisons, trace_training(task, one, options), reference, rtol);
  }
  // Losses, weights, norms and clip factors, and more than that.
  MEGATRON_ASSERT(comparisons.size() > 4 * static_cast<size_t>(steps), "nothing to compare");
  std::string text;
  for (const std::string& fault : reference.faults) text += cat("  one rank: ", fault, "\n");
  for (const std::string& fault : trace.faults) text += cat("  ", fault, "\n");
  int beyond = 0;
  for (const Comparison& c : comparisons)
    if (!(updates || c.quantity != Quantity::kStates ? c.holds() : c.difference == 0) &&
        ++beyond <= 8)
      text += cat("  ", c.name, ": ", c.difference, " > ", c.allowed, "\n");
  return text +
         (beyond > 8 ? cat("  and ", beyond - 8, " more of ", comparisons.size(), "\n") : "");
}

std::string failures(const std::vector<Proof>& proofs) {
  std::string text;
  for (const Proof& proof : proofs) {
    for (const ProofLine& line : proof.lines)
      if (line.failed > 0)
        text += cat("  ", proof.dtype, " ", line.failed, " of ", line.compared, " ", line.quantity,
                    ", worst ", line.worst, ": ", line.difference, " > ", line.allowed, "\n");
    for (const std::string& fault : proof.faults) text += cat("  ", proof.dtype, " ", fault, "\n");
  }
  return text;
}

}  // namespace megatron
