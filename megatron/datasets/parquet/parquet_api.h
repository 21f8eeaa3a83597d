// C interface of the shared library megatron_parquet.
#pragma once

#include <cstdint>

namespace megatron {

inline constexpr const char* kParquetLibrary = "libmegatron_parquet.so";

}  // namespace megatron

extern "C" {

// Opens a file for reading string columns, about `batch_bytes` of text at a time; the single column
// "*" means all columns of a row as a JSON object, "**" also those of bytes, as texts
// "data:;base64,...". Returns null and a message on failure.
void* megatron_parquet_open(const char* path, const char* const* columns, int num_columns,
                            int64_t batch_bytes, char* error, int64_t error_bytes);

// The next rows: for column c their text data[c] and the end of each, ends[c][0 .. rows). The
// memory is valid until the next call. `progress`: fraction of rows read so far. Returns the number
// of rows, 0 at the end, or -1 and a message on failure.
int64_t megatron_parquet_next(void* reader, const char** data, const int64_t** ends,
                              double* progress, char* error, int64_t error_bytes);

void megatron_parquet_close(void* reader);
}
