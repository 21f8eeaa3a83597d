// The build of the running program, which must be equal on all ranks of a job.
#pragma once

#include <string>

namespace megatron {

// The linker's build id (hexadecimal) of this program: equal for copies of one build in any path;
// different if code or data differ. The size of the file if there is no build id.
std::string program_build();

// The same for a loaded library, given the beginning of its file name ("libtorch_cpu.so"); empty:
// not loaded.
std::string library_build(const std::string& file_name);

}  // namespace megatron
