#include "megatron/training/start_notes.h"

#include "megatron/base/check.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/planning/layout_verdict.h"
#include "megatron/training/setup.h"
#include "megatron/transformer/ssm/reference_notes.h"

namespace megatron {

namespace {

// Measured with recipes/quickstart.yaml on two cores: seconds per iteration over those of fp32.
std::string half_precision_on_cpu(const Arguments& a) {
  const bool fp8 = a.transformer.fp8_format != Fp8Format::kNone;
  if (!a.optimizer.bf16 && !a.optimizer.fp16 && !fp8) return {};
  const char* const type = fp8 ? "--fp8-format" : a.optimizer.bf16 ? "--bf16" : "--fp16";
  return cat(type, " on a CPU is about ", fp8 ? 12 : 11,
             " times slower than fp32, unless the CPU has matrix units for it\nhint: leave it out "
             "to train in fp32");
}

}  // namespace

std::vector<std::string> start_notes(const Arguments& arguments, const Vocabulary& vocabulary,
                                     bool on_gpu, const ModelProvider& provider) {
  std::vector<std::string> notes;
  const auto add = [&](std::string note) {
    if (!note.empty()) notes.push_back(std::move(note));
  };
  if (!on_gpu) add(half_precision_on_cpu(arguments));
  // There is no estimate for dynamic context parallelism, and none for some models.
  const auto planned = [&] {
    return !arguments.parallel.hybrid_context_parallel &&
           unplanned_reason(whole_model(provider, arguments, vocabulary)->config()).empty();
  };
  if (on_gpu && arguments.transformer.attention_dropout > 0 && planned()) {
    const LayoutPlan plan = make_layout_plan(arguments, vocabulary, on_gpu, provider);
    add(attention_dropout_text(plan, make_layout_report(plan)));
  }
  if (on_gpu)
    for (std::string& note :
         reference_notes(arguments.transformer, arguments.parallel.tensor_model_parallel_size,
                         model_dtype(arguments.optimizer), ssm_kernels::has_scans(),
                         /*training=*/true))
      notes.push_back(std::move(note));
  return notes;
}

}  // namespace megatron
