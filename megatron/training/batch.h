// Turns micro-batches of the data loader into tensors on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "megatron/comm/process_group.h"
#include "megatron/datasets/data_loader.h"
#include "megatron/models/batch.h"
#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

// Totals of sequences of `tokens` tokens without padding. `loss_weight`: the whole column [b, ...].
SequenceTotals sequence_totals(const at::Tensor& loss_weight, int64_t tokens);

// The documents that the tokens of samples attend within, sample by sample; none: they attend to
// all of their sample.
std::vector<DocumentPlace> documents_of(const MicroBatch& source);

// The type of a column's tensor.
at::ScalarType scalar_type(ElementType type);

// Copies the columns of micro-batches to the device: of those that are split the part of this
// context-parallel rank, of those that are counted nothing.
// Host memory of copies to a GPU is held until take_held() returns it; the caller frees it when the
// copies have completed.
class BatchMaker {
 public:
  // Adds to a batch on the device what its columns do not hold.
  using Addition =
      std::function<void(const std::shared_ptr<const MicroBatch>&, c10::Device, Batch&)>;
  // `cp` must outlive it. `row_multiple` > 0: batches have the rows of texts without padding, a
  // multiple of it (Batch::rows_of); 0: they have not.
  BatchMaker(c10::Device device, const ProcessGroup& cp, int64_t row_multiple = 0,
             Addition add = {})
      : device_(device), cp_(cp), row_multiple_(row_multiple), add_(std::move(add)) {}
  Batch make(const std::shared_ptr<const MicroBatch>& source);
  std::vector<std::shared_ptr<const MicroBatch>> take_held() { return std::exchange(held_, {}); }

 private:
  c10::Device device_;
  const ProcessGroup& cp_;
  int64_t row_multiple_;
  Addition add_;
  int64_t length_ = 0;    // length of the whole sequences of the last batch
  at::Tensor positions_;  // [s]
  std::vector<std::shared_ptr<const MicroBatch>> held_;
};

// Tokens of the texts that columns mark (Column::marks_text), padding left out; 0: none does.
int64_t text_tokens(const MicroBatch& source);

// Page-locked memory for batches that go to a GPU; the heap otherwise.
HostAllocator host_allocator(const c10::Device& device);

}  // namespace megatron
