#include "megatron/training/batch.h"

#include <algorithm>
#include <mutex>
#include <span>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

namespace {

// [b, s]: index of each token's document, counted within its sequence.
at::Tensor document_tensor(const MicroBatch& source) {
  const int64_t length = source.sequence_length();
  at::Tensor ids = at::empty({source.micro_batch_size, length}, at::kLong);
  for (int64_t i = 0; i < source.micro_batch_size; ++i) {
    const std::vector<int64_t> row = document_ids(source.document_starts[i], length);
    std::copy(row.begin(), row.end(), ids.data_ptr<int64_t>() + i * length);
  }
  return ids;
}

std::shared_ptr<UnpaddedRows> document_rows(const MicroBatch& source, c10::Device device) {
  auto rows = std::make_shared<UnpaddedRows>(
      make_document_rows(documents_of(source), source.sequence_length(), source.micro_batch_size));
  rows->offsets = to_device(rows->offsets, device);
  rows->counts = to_device(rows->counts, device);
  return rows;
}

// The texts that column i marks.
TextMask texts_of(const MicroBatch& source, size_t i) {
  const auto elements = [&](size_t column) {
    return static_cast<size_t>(source.micro_batch_size * source.columns[column].shape[0]);
  };
  TextMask texts{{static_cast<const uint8_t*>(source.data().data(i)), elements(i)}};
  for (size_t j = 0; j < source.columns.size(); ++j)
    if (source.columns[j].extends == source.columns[i].name)
      texts.counts = {static_cast<const float*>(source.data().data(j)), elements(j)};
  return texts;
}

// Of the texts that column i marks.
std::shared_ptr<UnpaddedRows> unpadded_rows(const MicroBatch& source, size_t i, int64_t multiple_of,
                                            c10::Device device) {
  auto rows = std::make_shared<UnpaddedRows>(
      make_unpadded_rows(texts_of(source, i), source.ordinals, multiple_of));
  for (at::Tensor* tensor : rows->tensors()) *tensor = to_device(*tensor, device);
  return rows;
}

}  // namespace

std::vector<DocumentPlace> documents_of(const MicroBatch& source) {
  if (source.crosses_documents) return {};
  std::vector<DocumentPlace> places;
  for (int64_t i = 0; i < source.micro_batch_size; ++i) {
    const std::vector<int32_t> borders =
        cu_seqlens(source.document_starts[static_cast<size_t>(i)], source.sequence_length());
    for (size_t j = 0; j + 1 < borders.size(); ++j)
      places.push_back({i, borders[j], borders[j + 1] - borders[j]});
  }
  return places;
}

SequenceTotals sequence_totals(const at::Tensor& loss_weight, int64_t tokens) {
  const at::Tensor sums = loss_weight.flatten(1).sum(1, /*keepdim=*/false, at::kDouble);
  return {sums, at::full_like(sums, static_cast<double>(tokens))};
}

at::ScalarType scalar_type(ElementType type) {
  switch (type) {
    case ElementType::kInt64:
      return at::kLong;
    case ElementType::kInt32:
      return at::kInt;
    case ElementType::kUInt8:
      return at::kByte;
    case ElementType::kFloat32:
      break;
  }
  return at::kFloat;
}

Batch BatchMaker::make(const std::shared_ptr<const MicroBatch>& source) {
  MEGATRON_ASSERT(source != nullptr);
  const Columns& columns = source->columns;
  const int64_t s = source->sequence_length();
  const bool on_host = device_.is_cpu();
  Batch batch;
  std::vector<int64_t> shape;
  for (size_t i = 0; i < columns.size(); ++i) {
    const Column& column = columns[i];
    if (column.is_counted) continue;
    shape.assign(1, source->micro_batch_size);
    shape.insert(shape.end(), column.shape.begin(), column.shape.end());
    // The tensor keeps the batch's memory alive; nothing writes to it.
    const at::Tensor host = at::from_blob(
        source->data().data(i), shape, [source](void*) {},
        at::TensorOptions().dtype(scalar_type(column.type)));
    const at::Tensor whole = on_host ? host : host.to(device_, /*non_blocking=*/true);
    if (column.is_loss_weight && !batch.totals.loss_weight.defined()) {  // that of tokens is first
      batch.totals = sequence_totals(whole, s);
      batch.most_counted = column.most_counted;
    }
    if (column.marks_text && row_multiple_ > 0 && source->crosses_documents)
      batch.unpadded.emplace_back(column.name, unpadded_rows(*source, i, row_multiple_, device_));
    batch.set(column.name, column.split ? zigzag_slice(whole, 1, cp_) : whole);
  }
  if (!source->crosses_documents) {
    batch.document_ids = to_device(document_tensor(*source), device_);
    if (device_.is_cuda() && cp_.size() == 1) batch.document_rows = document_rows(*source, device_);
  }
  if (length_ != s) {
    length_ = s;
    positions_ = zigzag_positions(s, cp_.size(), cp_.rank(), device_);
  }
  batch.place.position = positions_;
  batch.place.sample = to_device(at::tensor(source->ordinals, at::kLong), device_);
  if (add_) add_(source, device_, batch);
  if (!on_host) held_.push_back(source);
  return batch;
}

int64_t text_tokens(const MicroBatch& source) {
  int64_t tokens = 0;
  for (size_t i = 0; i < source.columns.size(); ++i)
    if (source.columns[i].marks_text)
      for (const int64_t length : text_lengths(texts_of(source, i), source.micro_batch_size))
        tokens += length;
  return tokens;
}

HostAllocator host_allocator(const c10::Device& device) {
  if (!device.is_cuda()) return {};
  struct Pool {
    std::mutex mutex;
    std::unordered_map<void*, at::Tensor> blocks;
  };
  auto pool = std::make_shared<Pool>();
  HostAllocator out;
  out.allocate = [pool](size_t bytes) {
    const at::Tensor block = at::empty({static_cast<int64_t>(bytes)},
                                       at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    const std::lock_guard lock(pool->mutex);
    pool->blocks[block.data_ptr()] = block;
    return block.data_ptr();
  };
  out.deallocate = [pool](void* data, size_t) {
    const std::lock_guard lock(pool->mutex);
    pool->blocks.erase(data);
  };
  return out;
}

}  // namespace megatron
