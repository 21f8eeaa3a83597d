#include "megatron/reporting/flops.h"

#include <utility>

namespace megatron {

double peak_bf16_flops(const std::string& device_name) {
  // Data sheets, dense, SXM variants.
  static constexpr std::pair<const char*, double> kPeaks[] = {
      {"H100 PCIe", 756e12}, {"H200", 989e12},    {"H100", 989e12},  {"GH200", 989e12},
      {"H20", 148e12},       {"B200", 2250e12},   {"B100", 1750e12}, {"GB200", 2500e12},
      {"A100", 312e12},      {"A800", 312e12},    {"L40S", 362e12},  {"L4", 121e12},
      {"A10", 125e12},       {"RTX 4090", 165e12}};
  const std::pair<const char*, double>* best = nullptr;
  size_t best_length = 0;
  for (const auto& entry : kPeaks) {
    const std::string name = entry.first;
    if (device_name.find(name) != std::string::npos && name.size() > best_length) {
      best = &entry;
      best_length = name.size();
    }
  }
  return best ? best->second : 0.0;
}

}  // namespace megatron
