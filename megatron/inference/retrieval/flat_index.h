// Exact nearest neighbours, by products of all pairs.
//
// Note [Exact neighbours from fp32 products]: for a query q and a vector x, a product of matrices
// gives |x|^2 - 2 q.x, which orders vectors up to a rounding error of which a bound is known: a sum
// of n products in fp32, in whatever order, is off by at most g |q| |x|, g = n u / (1 - n u),
// u = 2^-24. A vector whose value less this bound is not above the k-th best distance so far gets
// its distance in fp64, by which alone vectors are ordered; all others cannot be among the nearest.
// So the result does not depend on blocks, threads or the library of the products.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megatron/datasets/retro/chunk_vectors.h"

namespace megatron {

class FlatIndex : public VectorIndex {
 public:
  // Blocks are read when a search needs them, one at a time.
  explicit FlatIndex(BlockFiles vectors);

  int64_t size() const override { return vectors_.shape().rows; }
  int64_t width() const override { return vectors_.shape().width; }
  // Throws Error as read_chunk_vectors().
  std::vector<int64_t> search(std::span<const float> queries, int64_t k) const override;

 private:
  BlockFiles vectors_;
};

}  // namespace megatron
