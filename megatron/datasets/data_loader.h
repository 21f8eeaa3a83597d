// Prefetches micro-batches on background threads, in order.
//
// The state of a loader is one number, consumed(); a new loader started from it continues exactly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "megatron/datasets/dataset.h"
#include "megatron/datasets/image_plan.h"
#include "megatron/datasets/sampler.h"

namespace megatron {

// Host memory for batches, for example page-locked. Called from any thread.
struct HostAllocator {
  std::function<void*(size_t bytes)> allocate;  // aligned to 64 bytes
  std::function<void(void*, size_t bytes)> deallocate;
};

// A micro-batch in one block of memory (ColumnBlock), each column [b, shape of a sample].
struct MicroBatch {
  explicit MicroBatch(Columns data_columns) : columns(std::move(data_columns)) {}
  const Columns columns;
  int64_t micro_batch_size = 0;
  void* block = nullptr;  // block_bytes bytes
  size_t block_bytes = 0;
  std::vector<int64_t> sample_ids;  // index into the dataset, or kPaddingSample
  // The number of each in the order of all samples, whoever reads it: the key of position-keyed
  // random numbers
  std::vector<int64_t> ordinals;
  std::vector<std::vector<int32_t>> document_starts;  // per sample, see Sample
  bool crosses_documents = true;                      // false if some sample has several documents
  int64_t consumed = 0;                               // consumed samples after this micro-batch
  std::optional<BatchImages> images;                  // of datasets whose samples may have media
  std::optional<BatchSounds> sounds;                  // likewise

  int64_t sequence_length() const { return columns.sequence_length(); }
  ColumnBlock data() const { return {columns, block, micro_batch_size}; }
};

struct DataLoaderOptions {
  SamplerConfig sampler;         // total_samples is taken from the dataset
  int64_t consumed_samples = 0;  // where to start
  int64_t num_workers = 2;       // 0: read in next()
  int64_t prefetch = 4;          // maximum of prefetched micro-batches
  HostAllocator allocator;       // default: the heap
  // Images and sounds are decoded by the rank that encodes them: as plan_images() divides them by
  // their costs
  ImageRanks image_ranks;
  MediaCosts media_costs;
  // Samples of the global batch that begins when so many are consumed, the first at
  // consumed_samples; null: samples stay where the sampler has them, else they change places within
  // it (balanced_samples()), by the costs of their images and sounds. Only of type single.
  std::function<int64_t(int64_t consumed)> global_batch_size;
};

class DataLoader {
 public:
  DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options);
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  // The next micro-batch, or null when the samples are used up. Rethrows exceptions of workers. The
  // memory is reused once the last pointer to the batch is gone, so keep it until an asynchronous
  // copy has ended; it stays valid after the loader is destroyed.
  std::shared_ptr<const MicroBatch> next();
  int64_t consumed() const;  // after the micro-batches returned so far
  const Dataset& dataset() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace megatron
