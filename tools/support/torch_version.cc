#include "tools/support/torch_version.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Looks up `int name(int*)` or `size_t name()` of a library that libtorch has loaded: the wheel has
// no headers of these libraries.
template <class Function>
Function loaded(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

std::string dotted(long version, long major_unit, long minor_unit) {
  return cat(version / major_unit, ".", version % major_unit / minor_unit, ".",
             version % minor_unit);
}

// libtorch has no function for its version; the text of its build settings contains it.
std::string loaded_torch_version() {
  const std::string settings = at::show_config();
  const std::string_view key = "TORCH_VERSION=";
  const size_t begin = settings.find(key);
  if (begin == std::string::npos) return "unknown";
  const size_t end = settings.find_first_of(", \n", begin);
  return settings.substr(begin + key.size(), end - begin - key.size());
}

}  // namespace

void megatron_torch_versions(Versions& all) {
  all.emplace_back("libtorch", loaded_torch_version());
  if (!at::hasCUDA()) return;
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  all.emplace_back("cuda-runtime", dotted(hooks.versionCUDART(), 1000, 10));
  if (hooks.compiledWithCuDNN())
    all.emplace_back("cudnn", dotted(hooks.versionRuntimeCuDNN(), 10000, 100));
  if (auto* get = loaded<size_t (*)()>("cublasLtGetVersion"))
    all.emplace_back("cublaslt", dotted(static_cast<long>(get()), 10000, 100));
  if (auto* get = loaded<int (*)(int*)>("ncclGetVersion")) {
    int number = 0;
    if (get(&number) == 0) all.emplace_back("nccl", dotted(number, 10000, 100));
  }
}

}  // namespace megatron
