// Rows of Parquet files, through the shared library megatron_parquet, which is loaded when the
// first such file is read: only it needs Arrow, so nothing else does.
#pragma once

#include <functional>

#include "megatron/datasets/document_source.h"

namespace megatron {

// Emits the rows of the string columns options.keys. False when `emit` returned false. Throws Error
// when the library or a column is missing, a value is null, or the file is damaged.
bool read_parquet(const InputFile& file, const ChunkOptions& options,
                  const std::function<bool(Chunk)>& emit);

}  // namespace megatron
