// Indices of Faiss behind a C interface (faiss_api.h).
#include <faiss/AutoTune.h>
#include <faiss/Index.h>
#include <faiss/index_factory.h>
#include <faiss/index_io.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "megatron/inference/retrieval/faiss_api.h"

namespace {

// What Faiss says is wrong, behind function, file, line and condition.
void set_error(const std::string& message, char* error, int64_t error_bytes) {
  std::string line = message;
  for (const std::string before : {".cpp:", "failed: "})
    if (const size_t at = line.rfind(before); at != std::string::npos)
      if (const size_t end = line.find(": ", at); end != std::string::npos) line.erase(0, end + 2);
  std::replace(line.begin(), line.end(), '\n', ' ');
  line.resize(std::min<size_t>(line.size(), static_cast<size_t>(error_bytes) - 1));
  std::memcpy(error, line.c_str(), line.size() + 1);
}

faiss::Index& index_of(void* index) { return *static_cast<faiss::Index*>(index); }

// What `body` returns, or `failed` and the message of what it threw.
template <class Body, class Result>
Result guarded(char* error, int64_t error_bytes, Result failed, const Body& body) {
  try {
    return body();
  } catch (const std::exception& thrown) {
    set_error(thrown.what(), error, error_bytes);
  }
  return failed;
}

}  // namespace

#define MEGATRON_EXPORT __attribute__((visibility("default")))

extern "C" {

MEGATRON_EXPORT void* megatron_faiss_make(int64_t width, const char* description, char* error,
                                          int64_t error_bytes) {
  return guarded(error, error_bytes, static_cast<void*>(nullptr), [&]() -> void* {
    return faiss::index_factory(static_cast<int>(width), description, faiss::METRIC_L2);
  });
}

MEGATRON_EXPORT void* megatron_faiss_read(const char* path, char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, static_cast<void*>(nullptr),
                 [&]() -> void* { return faiss::read_index(path); });
}

MEGATRON_EXPORT void megatron_faiss_free(void* index) { delete &index_of(index); }

MEGATRON_EXPORT int64_t megatron_faiss_rows(void* index) { return index_of(index).ntotal; }

MEGATRON_EXPORT int64_t megatron_faiss_width(void* index) { return index_of(index).d; }

MEGATRON_EXPORT int megatron_faiss_train(void* index, int64_t rows, const float* vectors,
                                         char* error, int64_t error_bytes) {
  return guarded(error, error_bytes, -1, [&] {
    index_of(index).train(rows, vectors);
    return 0;
  });
}

MEGATRON_EXPORT int megatron_faiss_add(void* index, int64_t rows, const float* vectors, char* error,
                                       int64_t error_bytes) {
  return guarded(error, error_bytes, -1, [&] {
    index_of(index).add(rows, vectors);
    return 0;
  });
}

MEGATRON_EXPORT int megatron_faiss_write(void* index, const char* path, char* error,
                                         int64_t error_bytes) {
  return guarded(error, error_bytes, -1, [&] {
    faiss::write_index(&index_of(index), path);
    return 0;
  });
}

MEGATRON_EXPORT int megatron_faiss_set(void* index, const char* name, double value, char* error,
                                       int64_t error_bytes) {
  return guarded(error, error_bytes, -1, [&] {
    faiss::ParameterSpace().set_index_parameter(&index_of(index), name, value);
    return 0;
  });
}

MEGATRON_EXPORT int megatron_faiss_search(void* index, int64_t queries, const float* vectors,
                                          int64_t k, int64_t* ids, char* error,
                                          int64_t error_bytes) {
  return guarded(error, error_bytes, -1, [&] {
    std::vector<float> distances(static_cast<size_t>(queries * k));
    index_of(index).search(queries, vectors, k, distances.data(), ids);
    return 0;
  });
}
}
