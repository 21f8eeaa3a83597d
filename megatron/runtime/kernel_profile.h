// GPU time by kernel name and kind, measured through CUPTI (libtorch's Kineto).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "megatron/base/json_writer.h"

namespace megatron {

enum class KernelKind { kGemm, kAttention, kCommunication, kCopy, kOther };
const char* to_string(KernelKind kind);

// Kind of a kernel by the profiler's name: GEMM, attention, communication (NCCL and copies between
// GPUs), other copies and fills, all others.
KernelKind kernel_kind(const std::string& name);

struct KernelTime {
  std::string name;
  KernelKind kind = KernelKind::kOther;
  int64_t calls = 0;
  double ms = 0.0;  // summed over its calls
};

// Time in which no kernel ran.
struct KernelGap {
  std::string after, before;
  double ms = 0.0;
};

struct KernelProfile {
  std::vector<KernelTime> kernels;  // the longest first
  std::vector<KernelGap> gaps;      // the longest first, at most kMaxGaps
  double span_ms = 0.0;             // from the first kernel's start to the last one's end
  // Time in which at least one kernel runs; span - busy is time in which the GPU waits for the host
  double busy_ms = 0.0;
  double exposed_communication_ms = 0.0;  // only communication runs

  static constexpr size_t kMaxGaps = 16;
  double total_ms(KernelKind kind) const;
};

// One kernel execution. Times in nanoseconds since an arbitrary moment.
struct KernelEvent {
  std::string name;
  int64_t start = 0;
  int64_t end = 0;
  int64_t stream = 0;
};
KernelProfile summarize_kernels(const std::vector<KernelEvent>& events);

// A timeline in the format of chrome://tracing and Perfetto, a row for each stream.
void write_timeline(const std::vector<KernelEvent>& events, int rank,
                    const std::filesystem::path& path);

// Runs `work`, which must end with a synchronization of the device. Returns nothing without a GPU.
// Profiling slows kernels down a little.
std::vector<KernelEvent> profile_kernels(const std::function<void()>& work);

// A table for a terminal: the kinds, then the `top` longest kernels.
std::string kernel_table(const KernelProfile& profile, size_t top);
void write_json(JsonWriter& json, const KernelProfile& profile);

}  // namespace megatron
