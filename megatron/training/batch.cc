#include "megatron/training/batch.h"

#include <mutex>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// [b, 1, s, s]: True where a token may not see an earlier one because a document ends between them.
at::Tensor document_mask(const MicroBatch& source) {
  const int64_t b = source.micro_batch_size, s = source.sequence_length;
  at::Tensor mask = at::zeros({b, 1, s, s}, at::kBool);
  for (int64_t i = 0; i < b; ++i) {
    const std::vector<bool> rows = attention_mask(source.document_starts[i], s);
    bool* out = mask.data_ptr<bool>() + i * s * s;
    std::copy(rows.begin(), rows.end(), out);
  }
  return mask;
}

}  // namespace

bool own_positions(const DataConfig& data) { return data.reset_position_ids || data.dataloader_inter_document_masking; }

Batch BatchMaker::make(const std::shared_ptr<const MicroBatch>& source) {
  MEGATRON_ASSERT(source != nullptr);
  const int64_t b = source->micro_batch_size, s = source->sequence_length;
  const bool on_host = device_.is_cpu();
  const auto tensor = [&](const void* data, at::ScalarType type) {
    const auto options = at::TensorOptions().dtype(type);
    // The tensor keeps the batch's memory alive; nothing writes to it.
    const at::Tensor host = at::from_blob(const_cast<void*>(data), {b, s}, [source](void*) {}, options);
    return on_host ? host : host.to(device_, /*non_blocking=*/true);
  };
  Batch batch;
  batch.tokens = tensor(source->tokens, at::kLong);
  batch.labels = tensor(source->labels, at::kLong);
  batch.loss_mask = tensor(source->loss_mask, at::kFloat);
  if (own_positions_) batch.position_ids = tensor(source->position_ids, at::kLong);
  if (!source->crosses_documents) batch.attention_mask = document_mask(*source).to(device_);
  if (!positions_.defined() || positions_.size(0) != s)
    positions_ = at::arange(s, at::TensorOptions().dtype(at::kLong).device(device_));
  batch.place.position = positions_;
  batch.place.sample = at::tensor(source->ordinals, at::kLong).to(device_);
  if (!on_host) held_.push_back(source);
  return batch;
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
    const at::Tensor block = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
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
