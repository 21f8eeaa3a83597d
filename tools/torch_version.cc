#include "tools/torch_version.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>
#include <torch/headeronly/version.h>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// A library's `int name(int*)` or `size_t name()` that libtorch has already loaded, found by name: the wheel has no headers
// of these libraries.
template <class Function>
Function loaded(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
}

std::string dotted(long version, long major_unit, long minor_unit) {
  return cat(version / major_unit, ".", version % major_unit / minor_unit, ".", version % minor_unit);
}

}  // namespace

Versions torch_versions() {
  Versions all = {{"libtorch", TORCH_VERSION}};
  if (!at::hasCUDA()) return all;
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  all.emplace_back("cuda-runtime", dotted(hooks.versionCUDART(), 1000, 10));
  if (hooks.compiledWithCuDNN()) all.emplace_back("cudnn", dotted(hooks.versionRuntimeCuDNN(), 10000, 100));
  if (auto* get = loaded<size_t (*)()>("cublasLtGetVersion"))
    all.emplace_back("cublaslt", dotted(static_cast<long>(get()), 10000, 100));
  if (auto* get = loaded<int (*)(int*)>("ncclGetVersion")) {
    int number = 0;
    if (get(&number) == 0) all.emplace_back("nccl", dotted(number, 10000, 100));
  }
  return all;
}

}  // namespace megatron
