// Shared objects that are loaded when something first needs them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace megatron {

// Where such an object lies: next to the program, or in ../lib.
std::vector<std::filesystem::path> paths_beside_program(const char* name);

class SharedObject {
 public:
  // The first of `paths` that can be loaded; it stays loaded. `needs`: "Parquet files need". Throws
  // Error with the reasons of the loader and `hint` if there is none.
  SharedObject(const char* name, const std::vector<std::filesystem::path>& paths,
               const std::string& needs, const std::string& hint);

  // Throws Error if there is no such function.
  template <class Function>
  void resolve(const char* function, Function& out) const {
    out = reinterpret_cast<Function>(find(function));
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  void* find(const char* function) const;

  const char* name_;
  std::filesystem::path path_;
  void* handle_ = nullptr;
};

}  // namespace megatron
