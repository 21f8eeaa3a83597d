// Device memory in rows of equal size, such as the blocks of a cache or the states of sequences:
// copies of rows, and rows and whole buffers that go to host memory and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace megatron {

// Copies are queued on the current stream; on CUDA host memory is pinned and nothing waits.
class StateBuffer {
 public:
  virtual ~StateBuffer() = default;

  // A row of each list goes to the same place of the other one.
  struct Rows {
    std::vector<int64_t> from, to;
  };
  // The leading `leading` entries of dimension 1, from a row to another one.
  void copy_row(int64_t from, int64_t to, int64_t leading);
  // Between device rows and host rows; there are `host_rows` of the latter, whose memory is
  // allocated by the first call.
  void swap_out(const Rows& rows, int64_t host_rows);
  void swap_in(const Rows& rows);
  void fill_with_nan(const std::vector<int64_t>& rows);

  // Frees the device's memory until reload(); `keep`: everything waits on the host, else it is
  // lost. Rows that were swapped out stay on the host.
  void offload(bool keep);
  void reload();

  void clear();                                     // frees all memory
  int64_t bytes() const;                            // on the device
  const at::Tensor& data() const { return data_; }  // [rows, ...]; undefined: nothing is held

 protected:
  // Rows of the given shape and type; larger memory keeps what is held.
  void reserve(int64_t rows, at::IntArrayRef shape, const at::TensorOptions& options);
  at::Tensor data_;

 private:
  at::Tensor host_;    // rows that were swapped out
  at::Tensor parked_;  // everything, after offload(true)
  // Shape, type and device of what offload() freed, in a tensor without memory.
  at::Tensor absent_;
};

// States of sequences by slot, [slots, ...].
class SlotBuffer final : public StateBuffer {
 public:
  // Memory for `slots` states of the given shape, in the type and on the device of `options`; that
  // of new slots is zero.
  at::Tensor rows(int64_t slots, at::IntArrayRef shape, const at::TensorOptions& options);
};

}  // namespace megatron
