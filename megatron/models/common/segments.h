// Rows without padding that attend within their segment: pictures, clips of sound; and where their
// features stand in sequences.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <span>

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

// Null stays null. Copies to a GPU are asynchronous, through page-locked memory.
std::shared_ptr<const UnpaddedRows> on_device(const std::shared_ptr<const UnpaddedRows>& segments,
                                              c10::Device device);

}  // namespace megatron
