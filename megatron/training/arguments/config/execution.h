// Where and how a process computes: its device, threads and CUDA graphs.
#pragma once

#include <cstdint>

#include "megatron/base/fields.h"
#include "megatron/runtime/device_choice.h"

namespace megatron {

enum class CudaGraphImpl { kNone, kLocal };
enum class RemovePadding { kAuto, kTrue, kFalse };

struct ExecutionConfig {
  DeviceChoice device = DeviceChoice::kAuto;
  int64_t num_threads = 0;  // 0: OMP_NUM_THREADS, else the rank's share of the cores
  bool gemm_tuning = true;
  CudaGraphImpl cuda_graph_impl = CudaGraphImpl::kNone;
  bool enable_cuda_graph = false;  // old spelling of --cuda-graph-impl local
  int64_t cuda_graph_warmup_steps = 3;
  RemovePadding remove_padding = RemovePadding::kAuto;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  bool uses_cuda_graphs() const {
    return enable_cuda_graph || cuda_graph_impl == CudaGraphImpl::kLocal;
  }
};

}  // namespace megatron
