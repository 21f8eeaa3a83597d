#include "megatron/training/arguments/padding_rules.h"

#include <numeric>

#include "megatron/base/format.h"
#include "megatron/training/arguments/t5_rules.h"
#include "megatron/training/arguments/task_heads.h"

namespace megatron {

bool pads_samples(std::string_view task) {
  return task == "bert" || trains_t5(task) || !heads_of_task(task).empty();
}

std::string why_padding_stays(const Arguments& a) {
  if (!pads_samples(a.training.task))
    return cat("samples of --task ", a.training.task, " have no padding");
  if (a.packs_masked_text()) return "samples of --bert-data packed have no padding";
  if (a.parallel.context_parallel_size > 1)
    return "--context-parallel-size divides each sample alike, with its padding";
  if (a.transformer.has_moe())
    return "routers of --num-experts send padding to experts and count it in their losses";
  return "";
}

int64_t unpadded_row_multiple(const Arguments& a) {
  if (a.training.remove_padding == RemovePadding::kFalse || !why_padding_stays(a).empty()) return 0;
  const TransformerConfig& t = a.transformer;
  const bool divided = a.parallel.sequence_parallel || t.distribute_saved_activations;
  const int64_t ranks = divided ? a.parallel.tensor_model_parallel_size : 1,
                of_products = t.is_quantized()
                                  ? t.quantization(t.num_layers_at_start_in_bf16 + 1).alignment()
                                  : 1;
  return ranks * of_products;
}

void validate_padding(const Arguments& a, Violations& v) {
  if (a.training.remove_padding != RemovePadding::kTrue) return;
  if (const std::string reason = why_padding_stays(a); !reason.empty())
    v.add(cat("--remove-padding true: ", reason), "--remove-padding auto");
}

}  // namespace megatron
