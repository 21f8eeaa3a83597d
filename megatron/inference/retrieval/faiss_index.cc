#include "megatron/inference/retrieval/faiss_index.h"

#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/base/loading/shared_object.h"
#include "megatron/inference/retrieval/faiss_api.h"

namespace megatron {
namespace {

struct FaissLibrary {
  decltype(&megatron_faiss_make) make = nullptr;
  decltype(&megatron_faiss_read) read = nullptr;
  decltype(&megatron_faiss_free) free = nullptr;
  decltype(&megatron_faiss_rows) rows = nullptr;
  decltype(&megatron_faiss_width) width = nullptr;
  decltype(&megatron_faiss_train) train = nullptr;
  decltype(&megatron_faiss_add) add = nullptr;
  decltype(&megatron_faiss_write) write = nullptr;
  decltype(&megatron_faiss_set) set = nullptr;
  decltype(&megatron_faiss_search) search = nullptr;
};

const FaissLibrary& faiss_library() {
  static const FaissLibrary loaded = [] {
    std::vector<std::filesystem::path> paths = paths_beside_program(kFaissLibrary);
    if (const char* given = std::getenv("MEGATRON_FAISS_LIBRARY"))
      paths.insert(paths.begin(), given);
    const SharedObject object(kFaissLibrary, paths, "indices other than Flat need",
                              "install Faiss (libfaiss-dev) and build again, or --retro-index-str "
                              "Flat, which is exact");
    FaissLibrary out;
    object.resolve("megatron_faiss_make", out.make);
    object.resolve("megatron_faiss_read", out.read);
    object.resolve("megatron_faiss_free", out.free);
    object.resolve("megatron_faiss_rows", out.rows);
    object.resolve("megatron_faiss_width", out.width);
    object.resolve("megatron_faiss_train", out.train);
    object.resolve("megatron_faiss_add", out.add);
    object.resolve("megatron_faiss_write", out.write);
    object.resolve("megatron_faiss_set", out.set);
    object.resolve("megatron_faiss_search", out.search);
    return out;
  }();
  return loaded;
}

constexpr int64_t kErrorBytes = 1024;

// Calls `run` with room for a message, which is thrown unless it returns 0.
template <class Run>
void checked(const std::string& what, const Run& run) {
  char error[kErrorBytes] = {};
  MEGATRON_CHECK(run(error) == 0, what, ": Faiss says: ", error);
}

}  // namespace

FaissIndex::FaissIndex(void* index) : index_(index, faiss_library().free) {}

FaissIndex FaissIndex::make(int64_t width, const std::string& description) {
  char error[kErrorBytes] = {};
  void* index = faiss_library().make(width, description.c_str(), error, kErrorBytes);
  MEGATRON_CHECK(index != nullptr, "--retro-index-str ", description, " of vectors of ", width,
                 ": Faiss says: ", error);
  return FaissIndex(index);
}

FaissIndex FaissIndex::read(const std::filesystem::path& file) {
  char error[kErrorBytes] = {};
  void* index = faiss_library().read(file.c_str(), error, kErrorBytes);
  MEGATRON_CHECK(index != nullptr, file.string(), ": Faiss says: ", error,
                 "\nhint: remove it, and retro makes it again");
  return FaissIndex(index);
}

int64_t FaissIndex::size() const { return faiss_library().rows(index_.get()); }

int64_t FaissIndex::width() const { return faiss_library().width(index_.get()); }

void FaissIndex::train(std::span<const float> vectors) {
  checked("training the index", [&](char* error) {
    return faiss_library().train(index_.get(), std::ssize(vectors) / width(), vectors.data(), error,
                                 kErrorBytes);
  });
}

void FaissIndex::add(std::span<const float> vectors) {
  checked("adding to the index", [&](char* error) {
    return faiss_library().add(index_.get(), std::ssize(vectors) / width(), vectors.data(), error,
                               kErrorBytes);
  });
}

void FaissIndex::write(const std::filesystem::path& file) const {
  std::filesystem::create_directories(file.parent_path());
  const std::filesystem::path part = file.string() + ".tmp-index";
  checked(part.string(), [&](char* error) {
    return faiss_library().write(index_.get(), part.c_str(), error, kErrorBytes);
  });
  std::filesystem::rename(part, file);
}

void FaissIndex::set_search(int64_t nprobe, int64_t ef_search) {
  char ignored[kErrorBytes] = {};  // indices without lists or graph have no such parameter
  for (const auto& [name, value] :
       {std::pair{"nprobe", nprobe}, {"efSearch", ef_search}, {"quantizer_efSearch", ef_search}})
    faiss_library().set(index_.get(), name, static_cast<double>(value), ignored, kErrorBytes);
}

std::vector<int64_t> FaissIndex::search(std::span<const float> queries, int64_t k) const {
  const int64_t count = std::ssize(queries) / width();
  std::vector<int64_t> ids(static_cast<size_t>(count * k), -1);
  if (count == 0) return ids;
  checked("searching the index", [&](char* error) {
    return faiss_library().search(index_.get(), count, queries.data(), k, ids.data(), error,
                                  kErrorBytes);
  });
  return ids;
}

}  // namespace megatron
