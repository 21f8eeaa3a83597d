// Exact nearest neighbours by products on a device, as a GPU.
//
// Note [Exact neighbours from rounded products]: products of vectors rounded to bf16, less the mean
// of some of them so that they are short, say of each query which vectors may be among its nearest,
// by the bounds of kernels/retrieval/nearest.h. What a rounded vector has lost is known, so the
// bounds hold for every vector, and are narrow: of random vectors of 1024 elements about 1.5 k
// candidates of a query are left for its k nearest. The limit is the k-th smallest upper bound so
// far. Squared distances of the candidates in fp64, of the vectors as they are stored, say which
// are the nearest and in what order; of equal ones the lower id comes first. The result is that of
// FlatIndex, up to distances that differ by rounding in fp64.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/datasets/retro/chunk_vectors.h"
#include "megatron/tensor/retrieval/nearest.h"

namespace megatron {

// Vectors in the memory of a device, as they are and rounded.
class DeviceVectors {
 public:
  DeviceVectors(int64_t rows, int64_t width, c10::Device device);
  static int64_t bytes_of_row(int64_t width);
  // Rows [first, first + n); `rows` fp32 [n, width] of any device. The first call fixes the centre.
  void set(int64_t first, const at::Tensor& rows);

  int64_t size() const { return vectors.size(0); }
  int64_t width() const { return vectors.size(1); }
  at::Tensor vectors;  // [rows, width] fp32
  at::Tensor centre;   // [width] fp32
  at::Tensor rounded;  // [rows, width] bf16, less the centre
  VectorBounds bounds;
};

// The k nearest of each query so far, nearest first: [queries, k], infinite and -1 behind.
struct NearestVectors {
  NearestVectors(int64_t queries, int64_t k, c10::Device device);
  at::Tensor distances, ids;  // fp64, int64
};

// Adds those of `vectors`, whose ids are `first_id` and up. `queries` fp32 [queries, width] on the
// device. `capacity`: candidates of a query that are held at once; less than k become k.
void search_device_vectors(const DeviceVectors& vectors, const at::Tensor& queries,
                           int64_t first_id, NearestVectors& nearest, int64_t capacity = 2048);

class DeviceFlatIndex : public VectorIndex {
 public:
  // `bytes`: memory for vectors. As many blocks as it has room for are on the device at once; all
  // of them stay there between searches if it has room for all. Throws Error if it has not for one.
  DeviceFlatIndex(BlockFiles vectors, c10::Device device, int64_t bytes);

  int64_t size() const override { return files_.shape().rows; }
  int64_t width() const override { return files_.shape().width; }
  // Throws Error as read_chunk_vectors(). One call at a time.
  std::vector<int64_t> search(std::span<const float> queries, int64_t k) const override;

 private:
  // Blocks [first, end).
  std::shared_ptr<const DeviceVectors> load(int64_t first, int64_t end) const;

  BlockFiles files_;
  c10::Device device_;
  int64_t blocks_at_once_;
  mutable std::shared_ptr<const DeviceVectors> all_;  // null: not loaded, or not at once
};

// A DeviceFlatIndex in half of a GPU's free memory, a FlatIndex on the CPU.
std::unique_ptr<VectorIndex> open_flat_index(BlockFiles vectors, c10::Device device);

}  // namespace megatron
