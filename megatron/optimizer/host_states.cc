#include "megatron/optimizer/host_states.h"

#include <algorithm>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using Stream = HostCopies::Stream;

constexpr size_t kBuffers = 4;  // gradient buffers

}  // namespace

void HostStates::add(const at::Tensor& values, const at::Tensor& grads, const Types& types,
                     std::vector<UpdateBlock> blocks) {
  const int64_t n = values.numel();
  Run run;
  run.values = values;
  run.first_piece = pieces_.size();
  run.states.master = copies_.host_lasting({n}, types.master);
  for (const at::ScalarType type : types.states)
    run.states.states.push_back(copies_.host_lasting({n}, type).zero_());
  const bool masters = types.master != values.scalar_type();
  if (masters) run.states.value = copies_.host_lasting({n}, values.scalar_type());

  std::sort(blocks.begin(), blocks.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  for (size_t first = 0, last = 0; first < blocks.size(); first = last) {
    const int64_t begin = blocks[first].begin;
    int64_t end = begin;
    for (last = first; last < blocks.size(); ++last) {
      const int64_t next = blocks[last].begin + blocks[last].count;
      if (last > first && next - begin > piece_elements_) break;
      end = next;
    }
    const auto part = [&](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.narrow(0, begin, end - begin) : tensor;
    };
    Piece piece;
    piece.update.master = part(run.states.master);
    for (const at::Tensor& state : run.states.states) piece.update.states.push_back(part(state));
    piece.update.value = part(run.states.value);
    piece.grads = part(grads);
    piece.values = part(values);
    piece.host_values = masters ? piece.update.value : piece.update.master;
    std::vector<UpdateBlock> own(blocks.begin() + static_cast<std::ptrdiff_t>(first),
                                 blocks.begin() + static_cast<std::ptrdiff_t>(last));
    for (UpdateBlock& block : own) block.begin -= begin;
    piece.update.grad = at::empty({0}, grads.options().device(at::kCPU));
    upload_blocks(piece.update, own);
    pieces_.push_back(std::move(piece));
  }
  run.last_piece = pieces_.size();
  runs_.push_back(std::move(run));
  load_values(/*masters_too=*/true);
}

at::Tensor HostStates::sum_of_squared_masters(size_t index) const {
  const Run& run = runs_[index];
  const at::Tensor all = at::zeros({1}, at::kDouble);
  for (size_t i = run.first_piece; i < run.last_piece; ++i) {
    FlatUpdate piece = pieces_[i].update;
    piece.grad = piece.master.to(pieces_[i].grads.scalar_type());
    at::Tensor sum = at::zeros({1}, at::kDouble);
    sum_of_squares(piece, sum);
    all.add_(sum);
  }
  return all;
}

void HostStates::copy_grads(size_t index) {
  Piece& piece = pieces_[index];
  const size_t buffer = index % kBuffers;
  if (buffers_.size() <= buffer) {
    int64_t largest = 0;
    for (const Piece& p : pieces_) largest = std::max(largest, p.grads.numel());
    buffers_.push_back(copies_.host_empty({largest}, piece.grads.scalar_type()));
    arrived_.emplace_back();
  }
  piece.update.grad = buffers_[buffer].narrow(0, 0, piece.grads.numel());
  copies_.copy(Stream::kToHost, piece.update.grad, piece.grads);
  arrived_[buffer] = copies_.mark(Stream::kToHost);
}

void HostStates::begin() {
  const HostCopies::Mark now = copies_.mark(Stream::kComputing);
  copies_.wait(Stream::kToHost, now);
  copies_.wait(Stream::kFromHost, now);  // the values have been read
  for (size_t i = 0; i < std::min(kBuffers, pieces_.size()); ++i) copy_grads(i);
}

void HostStates::step(
    const at::Tensor& state,
    const std::function<void(FlatUpdate& piece, const at::Tensor& state)>& update) {
  if (!host_state_.defined()) host_state_ = copies_.host_empty(state.sizes(), state.scalar_type());
  copies_.copy(Stream::kComputing, host_state_, state);
  copies_.mark(Stream::kComputing).synchronize();
  values_stored_.synchronize();
  if (static_cast<const StepState*>(host_state_.const_data_ptr())->skip != 0) {
    // The gradients may be overwritten once the started copies have finished.
    for (const HostCopies::Mark& mark : arrived_) copies_.wait(Stream::kComputing, mark);
    return;
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    Piece& piece = pieces_[i];
    arrived_[i % kBuffers].synchronize();
    update(piece.update, host_state_);
    if (i + kBuffers < pieces_.size()) copy_grads(i + kBuffers);
    copies_.copy(Stream::kFromHost, piece.values, piece.host_values);
  }
  values_stored_ = copies_.mark(Stream::kFromHost);
  copies_.wait(Stream::kComputing, values_stored_);
}

void HostStates::load_values(bool masters_too) {
  values_stored_.synchronize();
  for (Run& run : runs_) {
    const at::Tensor values = run.values.cpu();
    const bool masters = run.states.value.defined();
    if (masters) run.states.value.copy_(values);
    if (masters_too || !masters) run.states.master.copy_(values);
  }
}

}  // namespace megatron
