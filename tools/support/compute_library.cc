#include "tools/support/compute_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <string_view>

#include "megatron/base/check.h"
#include "tools/support/openmp_waiting.h"

namespace megatron {
namespace {

constexpr std::string_view kTorchLibraries[] = {"libtorch", "libc10"};

// The dynamic loader's error for a library that is not found starts with its name.
bool misses_torch(std::string_view reason) {
  return reason.find("cannot open shared object file: No such file") != std::string_view::npos &&
         std::any_of(std::begin(kTorchLibraries), std::end(kTorchLibraries),
                     [&](std::string_view name) { return reason.starts_with(name); });
}

void* load(const std::filesystem::path& path, const std::string& user) {
  std::error_code error;
  MEGATRON_CHECK(std::filesystem::exists(path, error), user, " needs ", path.string(),
                 ", which does not exist",
                 "\nhint: bin/ and lib/ belong together: build again, or copy the whole folder");
  set_openmp_waiting();
  // RTLD_GLOBAL, as if linked to the program: libraries that libtorch loads later need its symbols.
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (handle != nullptr) return handle;
  const std::string reason = ::dlerror();
  MEGATRON_CHECK(
      !misses_torch(reason), user, " needs libtorch ", MEGATRON_TORCH_VERSION,
      ", which was not found: ", reason, "\nhint: pip install torch==", MEGATRON_TORCH_VERSION,
      " and start with megatron-run, or add <site-packages>/torch/lib to LD_LIBRARY_PATH");
  throw_error(cat(user, " needs ", path.string(), ", which cannot be loaded: ", reason,
                  "\nhint: it is damaged or of another build than the program: build again, or "
                  "copy the whole folder"));
}

}  // namespace

std::filesystem::path compute_library_path() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  MEGATRON_CHECK(!error,
                 "cannot find the folder of this program: /proc/self/exe: ", error.message());
  return (program.parent_path() / ".." / "lib" / kComputeLibrary).lexically_normal();
}

void* compute_function(const std::filesystem::path& path, const char* name,
                       const std::string& user) {
  void* const function = ::dlsym(load(path, user), name);
  MEGATRON_CHECK(
      function != nullptr, user, " needs the function ", name, ", which ", path.string(),
      " does not have",
      "\nhint: it is of another build than the program: build again, or copy the whole folder");
  return function;
}

}  // namespace megatron
