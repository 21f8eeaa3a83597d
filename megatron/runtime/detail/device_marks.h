// Calls into the CUDA runtime; a build without CUDA has empty ones.
#pragma once

#include <string>

namespace megatron {

std::string detail_device_name(int index);
void detail_profiler(bool start);
void detail_push_range(const char* name);
void detail_pop_range();

}  // namespace megatron
