// Which build of the program runs: what every rank of a job must have alike.
#pragma once

#include <string>

namespace megatron {

// The linker's build id (hexadecimal) of this program: equal for copies of one build, whatever
// their paths; different as soon as code or data differ. The size of the file where there is no
// such id.
std::string program_build();

// The same of a library that is loaded, by what its file's name begins with ("libtorch_cpu.so");
// empty: it is not loaded.
std::string library_build(const std::string& file_name);

}  // namespace megatron
