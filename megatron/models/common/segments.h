// Rows without padding that attend within their segment: pictures, clips of sound; and where their
// features stand in sequences.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

// Segments of these lengths one after another, and empty rows behind them; on the CPU. `rows` as
// in make_unpadded_rows().
std::shared_ptr<const UnpaddedRows> segments_of_lengths(std::span<const int64_t> lengths,
                                                        int64_t rows = 0);

// None; `length`: what the rows of one would be.
std::shared_ptr<const UnpaddedRows> no_segments(int64_t length);

// Features stand at places i s + j of `b` samples of s tokens, in the order of `taken` (undefined:
// as they come). Keeps those at the `held` [s'] tokens of each sample, with places i s' + j.
// Returns by token its place, [b s], or -1. On the CPU.
at::Tensor keep_held(const at::Tensor& held, int64_t b, int64_t s, at::Tensor& places,
                     at::Tensor& taken);

// Of a medium: the sample that it is of, and the rank that encodes it.
struct OwnedFeatures {
  int64_t sample = 0, features = 0;
  int owner = 0;
};

// Where the features of each medium begin among those of all ranks that divide the media.
struct DividedFeatures {
  std::vector<int64_t> first;  // by medium
  int64_t most = 0;            // features of the rank that has most, for which each has room
  std::vector<int64_t> parts;  // PackedImages::parts
};

// On `rank` of `ranks` that divide the media of `samples` samples, in the order of these. With
// `replicas` > 0 encoders have ranks of their own (PackedImages::parts): rank -1 is none of them,
// and its features follow each other without room; on the others each replica has as many samples.
DividedFeatures divide_features(std::span<const OwnedFeatures> media, int64_t samples, int rank,
                                int ranks, int64_t replicas);

// Null stays null. Copies to a GPU are asynchronous, through page-locked memory.
std::shared_ptr<const UnpaddedRows> on_device(const std::shared_ptr<const UnpaddedRows>& segments,
                                              c10::Device device);

}  // namespace megatron
