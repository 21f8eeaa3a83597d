#include "megatron/base/loading/shared_object.h"

#include <dlfcn.h>

#include "megatron/base/check.h"

namespace megatron {

namespace fs = std::filesystem;

std::vector<fs::path> paths_beside_program(const char* name) {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {};
  return {program.parent_path() / name, program.parent_path() / ".." / "lib" / name};
}

SharedObject::SharedObject(const char* name, const std::vector<fs::path>& paths,
                           const std::string& needs, const std::string& hint)
    : name_(name) {
  std::string reasons;
  for (const fs::path& path : paths) {
    handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = path;
      return;
    }
    const std::string reason = ::dlerror();
    if (fs::exists(path)) reasons += "\ndetail: " + reason;
  }
  throw_error(cat(needs, " ", name, ", which was not built or cannot be loaded", reasons,
                  "\nhint: ", hint));
}

void* SharedObject::find(const char* function) const {
  void* const found = ::dlsym(handle_, function);
  MEGATRON_CHECK(found != nullptr, name_, " has no function ", function,
                 "\nhint: it belongs to another build; build again");
  return found;
}

}  // namespace megatron
