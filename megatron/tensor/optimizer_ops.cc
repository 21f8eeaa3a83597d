#include "megatron/tensor/optimizer_ops.h"

#include <cstring>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Blocks per task of the parallel loop: 64 Ki elements.
constexpr int64_t kGrainBlocks = 16;

int64_t num_blocks(const FlatUpdate& update) {
  return update.blocks.numel() / static_cast<int64_t>(sizeof(UpdateBlock));
}

const UpdateBlock* block_data(const FlatUpdate& update) {
  return static_cast<const UpdateBlock*>(update.blocks.data_ptr());
}

UpdateBuffers buffers_of(const FlatUpdate& update) {
  UpdateBuffers buffers;
  buffers.element = to_dtype(update.grad.scalar_type());
  buffers.grad = update.grad.data_ptr();
  if (update.master.defined()) {  // not needed for the norm
    buffers.master = update.master.data_ptr();
    buffers.master_type = to_dtype(update.master.scalar_type());
  }
  if (!update.states.empty()) {
    buffers.exp_avg = update.states[0].data_ptr();
    buffers.exp_avg_type = to_dtype(update.states[0].scalar_type());
  }
  if (update.states.size() > 1) {
    buffers.exp_avg_sq = update.states[1].data_ptr();
    buffers.exp_avg_sq_type = to_dtype(update.states[1].scalar_type());
  }
  if (update.value.defined()) {
    buffers.value = update.value.data_ptr();
    buffers.value_type = to_dtype(update.value.scalar_type());
  }
  return buffers;
}

StepState* state_data(const at::Tensor& state) {
  MEGATRON_ASSERT(state.numel() == static_cast<int64_t>(sizeof(StepState)) &&
                  state.is_contiguous());
  return static_cast<StepState*>(state.data_ptr());
}

template <class Body>
void for_each_block(const FlatUpdate& update, const Body& body) {
  const UpdateBlock* blocks = block_data(update);
  parallel_tasks(num_blocks(update), kGrainBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, blocks[i]);
  });
}

// The host loops need host memory; other devices have been handled before.
void check_host(const at::Tensor& tensor) {
  MEGATRON_CHECK(tensor.is_cpu(), "the optimizer has no kernels for device ", tensor.device().str(),
                 "\nhint: builds with -DMEGATRON_CUDA=ON also support CUDA devices");
}

}  // namespace

void upload_blocks(FlatUpdate& update, const std::vector<UpdateBlock>& blocks) {
  const int64_t count = static_cast<int64_t>(blocks.size());
  at::Tensor bytes = at::empty({count * static_cast<int64_t>(sizeof(UpdateBlock))}, at::kByte);
  if (count > 0) std::memcpy(bytes.data_ptr(), blocks.data(), blocks.size() * sizeof(UpdateBlock));
  update.blocks = bytes.to(update.grad.device());
  update.partials = at::zeros({count}, update.grad.options().dtype(at::kDouble));
}

void sum_of_squares(FlatUpdate& update, at::Tensor& sum) {
  const UpdateBuffers buffers = buffers_of(update);
  double* partials = update.partials.data_ptr<double>();
#if defined(MEGATRON_CUDA)
  if (update.grad.is_cuda()) {
    return sum_of_squares_cuda(buffers, block_data(update), num_blocks(update), partials,
                               sum.data_ptr<double>(), current_stream(update.grad));
  }
#endif
  check_host(update.grad);
  for_each_block(update, [&](int64_t i, const UpdateBlock& block) {
    partials[i] = block_sum_of_squares_cpu(buffers, block);
  });
  double total = 0.0;
  for (int64_t i = 0; i < num_blocks(update); ++i) total += partials[i];
  *sum.data_ptr<double>() = total;
}

void step_control(at::Tensor& state, const ParameterSchedule& schedule, const StepRules& rules,
                  const at::Tensor& sum, const at::Tensor& total_weight, int64_t samples) {
#if defined(MEGATRON_CUDA)
  if (state.is_cuda()) {
    return step_control_cuda(state_data(state), schedule, rules, sum.data_ptr<double>(),
                             total_weight.data_ptr<double>(), samples, current_stream(state));
  }
#endif
  check_host(state);
  const StepInputs inputs{*sum.data_ptr<double>(), *total_weight.data_ptr<double>(), samples};
  step_control(*state_data(state), schedule, rules, inputs);
}

void adamw_update(FlatUpdate& update, const at::Tensor& state, const AdamWConstants& constants) {
  MEGATRON_ASSERT(update.states.size() == 2, "AdamW has two moments, not ", update.states.size());
  const UpdateBuffers buffers = buffers_of(update);
  const StepState* record = state_data(state);
#if defined(MEGATRON_CUDA)
  if (update.grad.is_cuda()) {
    return adamw_cuda(buffers, block_data(update), num_blocks(update), record, constants,
                      current_stream(update.grad));
  }
#endif
  check_host(update.grad);
  for_each_block(update, [&](int64_t, const UpdateBlock& block) {
    adamw_block_cpu(buffers, block, *record, constants);
  });
}

void sgd_update(FlatUpdate& update, const at::Tensor& state, double momentum) {
  MEGATRON_ASSERT(update.states.size() == 1, "SGD has one momentum buffer, not ",
                  update.states.size());
  const UpdateBuffers buffers = buffers_of(update);
  const StepState* record = state_data(state);
#if defined(MEGATRON_CUDA)
  if (update.grad.is_cuda()) {
    return sgd_cuda(buffers, block_data(update), num_blocks(update), record, momentum,
                    current_stream(update.grad));
  }
#endif
  check_host(update.grad);
  for_each_block(update, [&](int64_t, const UpdateBlock& block) {
    sgd_block_cpu(buffers, block, *record, momentum);
  });
}

}  // namespace megatron
