#include "megatron/base/dtype.h"

#include <array>

#include "megatron/base/check.h"

namespace megatron {
namespace {

struct Entry {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<Entry, 11> kEntries = {{{"F64", 8},
                                             {"F32", 4},
                                             {"BF16", 2},
                                             {"F16", 2},
                                             {"I64", 8},
                                             {"I32", 4},
                                             {"I16", 2},
                                             {"I8", 1},
                                             {"U8", 1},
                                             {"BOOL", 1},
                                             {"F8_E4M3", 1}}};

}  // namespace

int64_t size_of(DType dtype) { return kEntries[static_cast<size_t>(dtype)].bytes; }

std::string_view to_string(DType dtype) { return kEntries[static_cast<size_t>(dtype)].name; }

DType dtype_from_string(std::string_view name) {
  for (size_t i = 0; i < kEntries.size(); ++i)
    if (kEntries[i].name == name) return static_cast<DType>(i);
  throw_error(cat("unknown element type \"", name,
                  "\"; expected one of F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL, F8_E4M3"));
}

}  // namespace megatron
