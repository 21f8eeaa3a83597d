#include "megatron/comm/one_shot/peer_collectives.h"

#if MEGATRON_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/kernels/peers/one_shot.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

static_assert(PeerCollectives::kMostRanks == kMostOneShotRanks);

int64_t channels_for(int64_t most_bytes) {
  return (std::min(most_bytes, PeerCollectives::kRoomForAll) + kOneShotChannelBytes - 1) /
         kOneShotChannelBytes;
}

bool is_reducible(at::ScalarType type) {
  return at::isFloatingType(type) ? c10::elementSize(type) > 1
                                  : type == at::kInt || type == at::kLong;
}

#if MEGATRON_CUDA
// From so many bytes on, with more than two ranks, less traffic is worth twice the latency.
constexpr int64_t kDividedFrom = 64 << 10;

OneShotLinks links_of(const ProcessGroup& group, const PeerMemory& peers, const at::Tensor& calls) {
  OneShotLinks links;
  links.rank = group.rank();
  links.ranks = group.size();
  std::ranges::copy(peers.addresses(), links.inboxes);
  links.calls = reinterpret_cast<uint32_t*>(calls.data_ptr<int32_t>());
  return links;
}
#endif

}  // namespace

int64_t PeerCollectives::memory_bytes(int64_t group_size, int64_t most_bytes) {
  if (group_size == 1 || group_size > kMostRanks) return 0;
  const int64_t channels = channels_for(most_bytes);
  return one_shot_inbox_bytes(group_size, channels) +
         channels * static_cast<int64_t>(sizeof(uint32_t));
}

void PeerCollectives::open(at::Device device, int64_t most_bytes) {
  if (group_.size() == 1 || !obstacle_.empty() || (is_open() && most_bytes <= most_bytes_)) return;
  if (!device.is_cuda() || group_.size() > kMostRanks) {
    obstacle_ = device.is_cuda()
                    ? cat("the group has ", group_.size(), " ranks, more than ", kMostRanks)
                    : "the ranks are on CPUs";
    return;
  }
  if (is_open()) {
    // No rank writes into memory that is freed.
    const at::Tensor ended = at::zeros({1}, calls_.options());
    all_reduce(ended, ReduceOp::kSum);
    ended.item<int32_t>();
    peers_ = nullptr;
  }
  const int64_t channels = channels_for(most_bytes);
  const at::TensorOptions here = at::TensorOptions().device(device);
  inbox_ = at::zeros({one_shot_inbox_bytes(group_.size(), channels)}, here.dtype(at::kByte));
  calls_ = at::zeros({channels}, here.dtype(at::kInt));
  SharedMemory shared = share_memory(inbox_, group_);
  peers_ = std::move(shared.peers);
  obstacle_ = std::move(shared.obstacle);
  most_bytes_ = most_bytes;
  room_ = channels * kOneShotChannelBytes;
}

void PeerCollectives::take_all_reductions() {
  MEGATRON_CHECK(is_open(), "sums over ", group_.size(),
                 " tensor ranks have no fixed order: ", obstacle_,
                 "\nhint: GPUs of one host that reach each other's memory, or two tensor ranks");
  takes_all_ = true;
}

std::shared_ptr<PeerCollectives> ordered_reductions(const ProcessGroup& group, at::Device device) {
  if (!is_batch_invariant() || device.is_cpu() || group.size() <= 2) return nullptr;
  std::shared_ptr<PeerCollectives> all = group.peer_collectives();
  all->open(device, PeerCollectives::kRoomForAll);
  all->take_all_reductions();
  return all;
}

bool PeerCollectives::takes_reduction(const at::Tensor& tensor) const {
  return is_open() && tensor.is_cuda() && tensor.is_contiguous() &&
         is_reducible(tensor.scalar_type()) &&
         (takes_all_ || static_cast<int64_t>(tensor.nbytes()) <= most_bytes_);
}

bool PeerCollectives::takes_gather(const at::Tensor& tensor) const {
  return is_open() && tensor.is_cuda() && tensor.is_contiguous() &&
         static_cast<int64_t>(tensor.nbytes()) <= room_;
}

// In one piece, in rows of whole groups of 16 bytes.
bool PeerCollectives::takes_factors(const at::Tensor& tensor, const at::Tensor& factors) const {
  constexpr int64_t kGroup = 16;
  const int64_t row = static_cast<int64_t>(tensor.nbytes()) / factors.numel();
  return takes_reduction(tensor) && at::isFloatingType(tensor.scalar_type()) && row % kGroup == 0 &&
         static_cast<int64_t>(tensor.nbytes()) <= room_;
}

#if MEGATRON_CUDA

void PeerCollectives::all_reduce(const at::Tensor& tensor, ReduceOp op, const at::Tensor& addend,
                                 const at::Tensor& factors) {
  MEGATRON_ASSERT(takes_reduction(tensor), "a reduction of ", tensor.toString());
  const c10::cuda::CUDAGuard guard(tensor.device());
  OneShotReduction args;
  args.links = links_of(group_, *peers_, calls_);
  args.dtype = to_dtype(tensor.scalar_type());
  args.op = op == ReduceOp::kMax ? OneShotOp::kMax : OneShotOp::kSum;
  const auto width = static_cast<int64_t>(tensor.element_size());
  args.divided = group_.size() > 2 && static_cast<int64_t>(tensor.nbytes()) >= kDividedFrom;
  if (addend.defined())
    MEGATRON_ASSERT(addend.is_contiguous() && addend.scalar_type() == tensor.scalar_type() &&
                        addend.numel() == tensor.numel(),
                    "an addend of ", addend.toString(), " for ", tensor.toString());
  if (factors.defined()) {
    MEGATRON_ASSERT(takes_factors(tensor, factors), factors.numel(), " factors of rows of ",
                    tensor.toString());
    args.factors = factors.const_data_ptr<float>();
    args.row = tensor.numel() / factors.numel();
  }
  for (int64_t first = 0; first < tensor.numel(); first += args.count) {
    args.count = std::min(tensor.numel() - first, room_ / width);
    args.out = static_cast<char*>(tensor.data_ptr()) + first * width;
    args.values = args.out;
    if (addend.defined())
      args.addend = static_cast<const char*>(addend.const_data_ptr()) + first * width;
    one_shot_reduction_cuda(args,
                            c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream());
  }
}

void PeerCollectives::all_gather(const at::Tensor& output, const at::Tensor& input) {
  MEGATRON_ASSERT(takes_gather(input) && output.is_contiguous() &&
                      output.nbytes() == input.nbytes() * static_cast<size_t>(group_.size()),
                  "a gather of ", input.toString(), " [", input.numel(), "] into [", output.numel(),
                  "]");
  const c10::cuda::CUDAGuard guard(input.device());
  OneShotGather args;
  args.links = links_of(group_, *peers_, calls_);
  args.values = input.const_data_ptr();
  args.out = output.data_ptr();
  args.bytes = static_cast<int64_t>(input.nbytes());
  one_shot_gather_cuda(args, c10::cuda::getCurrentCUDAStream(input.device().index()).stream());
}

#else

void PeerCollectives::all_reduce(const at::Tensor&, ReduceOp, const at::Tensor&,
                                 const at::Tensor&) {
  MEGATRON_ASSERT(false, "this program was built without CUDA");
}
void PeerCollectives::all_gather(const at::Tensor&, const at::Tensor&) {
  MEGATRON_ASSERT(false, "this program was built without CUDA");
}

#endif

}  // namespace megatron
