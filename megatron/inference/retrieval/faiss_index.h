// Approximate nearest neighbours by Faiss, a shared library that is loaded when an index of it is
// first used. Files are Faiss's own (faiss::write_index).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "megatron/datasets/retro/chunk_vectors.h"

namespace megatron {

class FaissIndex : public VectorIndex {
 public:
  // An empty index, as faiss::index_factory makes it of a description such as
  // "IVF4096_HNSW32,Flat"; or that of a file. Throw Error: there is no such library, no such kind,
  // a file that is none.
  static FaissIndex make(int64_t width, const std::string& description);
  static FaissIndex read(const std::filesystem::path& file);

  int64_t size() const override;
  int64_t width() const override;
  // [rows, width] each. Training throws Error for fewer rows than the index has lists.
  void train(std::span<const float> vectors);
  void add(std::span<const float> vectors);
  void write(const std::filesystem::path& file) const;  // under a temporary name, then renamed
  // Lists that a search looks into, and how far it looks among vectors or lists in a graph; the
  // index takes what it has.
  void set_search(int64_t nprobe, int64_t ef_search);
  std::vector<int64_t> search(std::span<const float> queries, int64_t k) const override;

 private:
  explicit FaissIndex(void* index);
  std::unique_ptr<void, void (*)(void*)> index_;
};

}  // namespace megatron
