// Rows of Parquet files, through the shared library megatron_parquet, which is loaded when the
// first such file is read, so that nothing else depends on Arrow.
#pragma once

#include <functional>

#include "megatron/datasets/sources/document_source.h"

namespace megatron {

// Emits the rows of the string columns options.keys. False if `emit` returned false. Throws Error
// if the library or a column is missing, a value is null, or the file is damaged.
bool read_parquet(const DocumentFile& file, const ChunkOptions& options,
                  const std::function<bool(Chunk)>& emit);

}  // namespace megatron
