// C interface of the shared library megatron_faiss.
#pragma once

#include <cstdint>

namespace megatron {

inline constexpr const char* kFaissLibrary = "libmegatron_faiss.so";

}  // namespace megatron

extern "C" {

// An index of vectors of this width, by squared L2 distance, as faiss::index_factory makes it from
// a description; or of a file of faiss::write_index. Null and a message on failure.
void* megatron_faiss_make(int64_t width, const char* description, char* error, int64_t error_bytes);
void* megatron_faiss_read(const char* path, char* error, int64_t error_bytes);
void megatron_faiss_free(void* index);

int64_t megatron_faiss_rows(void* index);
int64_t megatron_faiss_width(void* index);

// 0, or -1 and a message on failure. `rows` vectors, [rows, width].
int megatron_faiss_train(void* index, int64_t rows, const float* vectors, char* error,
                         int64_t error_bytes);
int megatron_faiss_add(void* index, int64_t rows, const float* vectors, char* error,
                       int64_t error_bytes);
int megatron_faiss_write(void* index, const char* path, char* error, int64_t error_bytes);
// A parameter of faiss::ParameterSpace, such as nprobe; -1 also where the index has none of the
// name.
int megatron_faiss_set(void* index, const char* name, double value, char* error,
                       int64_t error_bytes);
// Ids [queries, k], -1 behind if there are fewer.
int megatron_faiss_search(void* index, int64_t queries, const float* vectors, int64_t k,
                          int64_t* ids, char* error, int64_t error_bytes);
}
