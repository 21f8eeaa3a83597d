// Loads libmegatron_compute.so, and with it libtorch, only for commands that need them: registering
// libtorch's operators takes a third of a second and 100 MB.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>

namespace megatron {

inline constexpr char kComputeLibrary[] = "libmegatron_compute.so";

// ../lib/libmegatron_compute.so, relative to the folder of the running program.
std::filesystem::path compute_library_path();

// Address of the C function `name` in the library at `path`, which is loaded at the first call.
// `user`: the command that needs it ("pretrain"). Throws Error if the file, libtorch or the
// function is missing.
void* compute_function(const std::filesystem::path& path, const char* name,
                       const std::string& user);

template <size_t kSize>
struct FunctionName {
  consteval FunctionName(const char (&name)[kSize]) {
    std::copy_n(name, kSize, text);
  }  // NOLINT: a literal
  char text[kSize];
};

// A command of the library, for the table of commands.
template <FunctionName kName>
int computing(int argc, char** argv) {
  void* const function = compute_function(compute_library_path(), kName.text, argv[0]);
  return reinterpret_cast<int (*)(int, char**)>(function)(argc, argv);
}

}  // namespace megatron
