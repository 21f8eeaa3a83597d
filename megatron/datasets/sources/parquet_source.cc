#include "megatron/datasets/sources/parquet_source.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>

#include "megatron/base/check.h"
#include "megatron/base/loading/shared_object.h"
#include "megatron/datasets/parquet/parquet_api.h"

namespace megatron {
namespace {

struct ParquetLibrary {
  decltype(&megatron_parquet_open) open = nullptr;
  decltype(&megatron_parquet_next) next = nullptr;
  decltype(&megatron_parquet_close) close = nullptr;
};

const ParquetLibrary& library() {
  static const ParquetLibrary loaded = [] {
    std::vector<std::filesystem::path> paths = paths_beside_program(kParquetLibrary);
    if (const char* given = std::getenv("MEGATRON_PARQUET_LIBRARY"))
      paths.insert(paths.begin(), given);
    const SharedObject object(kParquetLibrary, paths, "Parquet files need",
                              "install the pyarrow wheel (`make setup` does) and build again");
    ParquetLibrary out;
    object.resolve("megatron_parquet_open", out.open);
    object.resolve("megatron_parquet_next", out.next);
    object.resolve("megatron_parquet_close", out.close);
    return out;
  }();
  return loaded;
}

}  // namespace

bool read_parquet(const DocumentFile& file, const ChunkOptions& options,
                  const std::function<bool(Chunk)>& emit) {
  const ParquetLibrary& api = library();
  std::vector<const char*> columns;
  for (const std::string& key : options.keys) columns.push_back(key.c_str());
  char error[1024] = {};
  const std::unique_ptr<void, decltype(api.close)> reader(
      api.open(file.path.c_str(), columns.data(), static_cast<int>(columns.size()),
               static_cast<int64_t>(options.chunk_bytes), error, sizeof error),
      api.close);
  MEGATRON_CHECK(reader != nullptr, file.path, ": ", error);
  const auto size = static_cast<uint64_t>(std::filesystem::file_size(file.path));
  uint64_t accounted = 0;
  std::vector<const char*> data(columns.size());
  std::vector<const int64_t*> ends(columns.size());
  int64_t row = 1;
  for (;;) {
    double progress = 0;
    const int64_t rows =
        api.next(reader.get(), data.data(), ends.data(), &progress, error, sizeof error);
    MEGATRON_CHECK(rows >= 0, file.path, ": near row ", row, ": ", error);
    Chunk chunk;
    chunk.file = &file;
    const auto done =
        rows == 0 ? size : static_cast<uint64_t>(progress * static_cast<double>(size));
    chunk.file_bytes = done - std::min(accounted, done);
    accounted = std::max(accounted, done);
    chunk.first_line = row;
    chunk.ends.resize(columns.size());
    for (size_t c = 0; c < columns.size() && rows > 0; ++c) {
      const auto base = static_cast<int64_t>(chunk.text.size());
      chunk.text.append(data[c], ends[c][rows - 1]);
      for (int64_t r = 0; r < rows; ++r) chunk.ends[c].push_back(base + ends[c][r]);
    }
    if (!emit(std::move(chunk))) return false;
    if (rows == 0) return true;
    row += rows;
  }
}

}  // namespace megatron
