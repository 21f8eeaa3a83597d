#include "megatron/training/arguments/config/execution.h"

#include "megatron/base/threads.h"
#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

// The last three: that model of GPU
constexpr std::string_view kDevices[] = {"auto", "cpu", "cuda", "h100", "h200", "b200"};
constexpr std::string_view kGraphImpls[] = {"none", "local"};
constexpr std::string_view kRemovePadding[] = {"auto", "true", "false"};

}  // namespace

void ExecutionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.list_after("skip_train");
  v.choice("device", device, kDevices,
           "auto: the GPU when there is one; h100, h200, b200: a GPU of that model");
  v.field("num_threads", num_threads, kNumThreadsHelp);
  v.field({"gemm_tuning", "--no-gemm-tuning", true}, gemm_tuning,
          "take cuBLASLt's own choice of algorithms in place of the fastest, timed once and kept "
          "in ~/.cache/megatron");
  v.choice("cuda_graph_impl", cuda_graph_impl, kGraphImpls,
           "local: forward and backward of a micro-batch are one CUDA graph");
  v.field("enable_cuda_graph", enable_cuda_graph, "--cuda-graph-impl local");
  v.field("cuda_graph_warmup_steps", cuda_graph_warmup_steps,
          "iterations without CUDA graphs at the start of a run");
  v.choice("remove_padding", remove_padding, kRemovePadding,
           "compute only the rows of the texts of encoders and encoder-decoders, not the padding "
           "behind them; auto: where that is built; false: all rows");
}

void ExecutionConfig::validate(Violations& v) const {
  at_least(v, "--num-threads", num_threads, 0);
  at_least(v, "--cuda-graph-warmup-steps", cuda_graph_warmup_steps, 1);
}

}  // namespace megatron
