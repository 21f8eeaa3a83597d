#include <algorithm>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/routing_math.h"
#include "megatron/kernels/experts/routing.h"

namespace megatron {
namespace {

// A warp computes a row; lane i has the elements i, i + 32, ... of it. Their scores lie in shared
// memory.
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMostWarps = 8;
constexpr size_t kUsualSharedBytes = size_t{48} * 1024;

template <class Acc, class Op>
__device__ __forceinline__ Acc reduce_warp(Acc value, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

template <class Acc, class F>
__device__ __forceinline__ Acc warp_sum(int n, int lane, const F& f) {
  Acc sum = 0;
  for (int i = lane; i < n; i += 32) sum += f(i);
  return reduce_warp(sum, AddOp{});
}

template <class Acc>
struct Softmax {
  Acc max = 0, sum = 1;
  __device__ Acc of(Acc logit) const { return fast_exp(logit - max) / sum; }
  __device__ Acc lse() const { return max + log_of_sum(sum); }
};

template <class Acc, class F>
__device__ Softmax<Acc> softmax_over(int n, int lane, const F& logit) {
  Acc most = -static_cast<Acc>(INFINITY);
  for (int i = lane; i < n; i += 32) most = MaxOp{}(logit(i), most);
  Softmax<Acc> softmax;
  softmax.max = reduce_warp(most, MaxOp{});
  softmax.sum = warp_sum<Acc>(n, lane, [&](int i) { return fast_exp(logit(i) - softmax.max); });
  return softmax;
}

// A place in the order of scores: by key downwards, then by index upwards.
template <class Key>
struct Place {
  Key key;
  int index;
  __device__ bool before(Key other, int other_index) const {
    return key > other || (key == other && index < other_index);
  }
};

__device__ __forceinline__ Place<uint32_t> first_of_warp(Place<uint32_t> mine) {
  const uint32_t key = __reduce_max_sync(kAllLanes, mine.key);
  const unsigned index = mine.key == key ? static_cast<unsigned>(mine.index) : kAllLanes;
  return {key, static_cast<int>(__reduce_min_sync(kAllLanes, index))};
}
__device__ __forceinline__ Place<uint64_t> first_of_warp(Place<uint64_t> mine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Place<uint64_t> other = {__shfl_xor_sync(kAllLanes, mine.key, offset),
                                   __shfl_xor_sync(kAllLanes, mine.index, offset)};
    if (other.before(mine.key, mine.index)) mine = other;
  }
  return mine;
}

// The first of this lane's scores that come after `last`. Every key is above 0.
template <class Acc, class Key>
__device__ Place<Key> first_of_lane(const Acc* scores, int n, int lane, Place<Key> last) {
  Place<Key> first = {0, 0x7fffffff};
  for (int i = lane; i < n; i += 32) {
    const Key key = order_key(scores[i]);
    if (last.before(key, i) && key > first.key) first = {key, i};
  }
  return first;
}

// take(j, i) with the index i of the j-th highest of n scores, j < count <= n. Returns the last.
template <class Acc, class Take>
__device__ auto choose(const Acc* scores, int n, int count, int lane, const Take& take) {
  using Key = decltype(order_key(Acc()));
  Place<Key> last = {static_cast<Key>(~Key{0}), -1};
  Place<Key> mine = first_of_lane(scores, n, lane, last);
  for (int j = 0; j < count; ++j) {
    last = first_of_warp(mine);
    take(j, last.index);
    if (mine.index == last.index) mine = first_of_lane(scores, n, lane, last);
  }
  return last;
}

// The shared memory of a block.
template <class Acc>
struct Memory {
  int experts, groups, topk, sums;  // elements of each, of a warp
  int counts;                       // of the block
  __host__ __device__ size_t bytes(int warps) const {
    return sizeof(Acc) * static_cast<size_t>(warps) * static_cast<size_t>(experts + groups + sums) +
           sizeof(int) * (static_cast<size_t>(warps) * static_cast<size_t>(2 * topk) +
                          static_cast<size_t>(counts));
  }
  __device__ Acc* scores(void* from, int warp) const {
    return static_cast<Acc*>(from) + warp * (experts + groups + sums);
  }
  __device__ int* chosen(void* from, int warps, int warp) const {
    return reinterpret_cast<int*>(scores(from, warps)) + warp * 2 * topk;
  }
  __device__ int* block_counts(void* from, int warps) const { return chosen(from, warps, warps); }
};

// Scores of experts outside the best groups become -inf. `group_scores`: memory.
template <class Acc>
__device__ void mask_groups(const RoutingOptions& options, int experts, int lane, Acc* scores,
                            Acc* group_scores) {
  const int groups = static_cast<int>(options.num_groups), size = experts / groups;
  const int summed = static_cast<int>(scores_of_group(options));
  for (int g = 0; g < groups; ++g) {
    const Acc* own = scores + g * size;
    Acc sum = 0;
    choose(own, size, summed, lane, [&](int, int i) { sum += own[i]; });
    if (lane == 0) group_scores[g] = sum;
  }
  __syncwarp();
  const auto last =
      choose(group_scores, groups, static_cast<int>(options.group_topk), lane, [](int, int) {});
  for (int e = lane; e < experts; e += 32)
    if (last.before(order_key(group_scores[e / size]), e / size))
      scores[e] = -static_cast<Acc>(INFINITY);
  __syncwarp();
}

// One row of the forward, computed by a warp.
template <class Acc>
struct ForwardRow {
  const RouterRows& rows;
  const RouterForward& args;
  int lane, n, k;
  Acc *scores, *group_scores, *sums;
  int *chosen, *others;
  const Acc* logits = nullptr;
  Softmax<Acc> softmax = {};

  __device__ bool is_softmax() const { return rows.options.score == RouterScore::kSoftmax; }
  __device__ Acc base(int e) const {
    return is_softmax() ? logits[e] : expert_score(logits[e], rows.options.score);
  }
  __device__ Acc selection(int e) const {
    if (is_softmax() && rows.options.pre_softmax) return softmax.of(logits[e]);
    return args.bias != nullptr ? base(e) + static_cast<const Acc*>(args.bias)[e] : base(e);
  }

  __device__ void run(int64_t i, int* counts) {
    logits = static_cast<const Acc*>(rows.logits) + i * n;
    if (is_softmax() ? rows.options.pre_softmax || args.sums != nullptr : args.squares)
      softmax = softmax_over<Acc>(n, lane, [&](int e) { return logits[e]; });
    if (args.choices != nullptr) take_choices(args.choices + i * k);
    if (args.weights != nullptr) weigh(static_cast<Acc*>(args.weights) + i * k);
    if (rows.padding != nullptr && rows.padding[i]) return;
    if (args.counts != nullptr) count(counts);
    if (args.sums != nullptr) add();
  }

  __device__ void take_choices(int32_t* choices) {
    if (args.choices_given) {
      for (int j = lane; j < k; j += 32) chosen[j] = choices[j];
    } else {
      for (int e = lane; e < n; e += 32) scores[e] = selection(e);
      __syncwarp();
      if (rows.options.num_groups > 0) mask_groups(rows.options, n, lane, scores, group_scores);
      choose_into(chosen);
      for (int j = lane; j < k; j += 32) choices[j] = chosen[j];
    }
    __syncwarp();
  }

  __device__ void choose_into(int* to) const {
    choose(scores, n, k, lane, [&](int j, int e) {
      if (lane == 0) to[j] = e;
    });
    __syncwarp();
  }

  __device__ void weigh(Acc* weights) const {
    const Acc scale = weight_scale<Acc>(rows.options);
    const auto logit = [&](int j) { return logits[chosen[j]]; };
    if (!is_softmax()) {
      const auto score = [&](int j) { return base(chosen[j]); };
      const Acc sum = k == 1 ? Acc(1) : with_smallest(warp_sum<Acc>(k, lane, score));
      for (int j = lane; j < k; j += 32) weights[j] = score(j) / sum * scale;
      return;
    }
    const Softmax<Acc> own = rows.options.pre_softmax ? softmax : softmax_over<Acc>(k, lane, logit);
    for (int j = lane; j < k; j += 32) weights[j] = own.of(logit(j)) * scale;
  }

  __device__ void count(int* counts) const {
    const int* best = chosen;
    if (!chooses_by_share(rows, args)) {
      for (int e = lane; e < n; e += 32) scores[e] = base(e);
      __syncwarp();
      choose_into(others);
      best = others;
    }
    for (int j = lane; j < k; j += 32) atomicAdd(counts + best[j], 1);
    __syncwarp();
  }

  // A lane adds to columns of its own.
  __device__ void add() const {
    if (is_softmax()) {
      for (int e = lane; e < n; e += 32) sums[e] += softmax.of(logits[e]);
    } else {
      const Acc sum = with_smallest(warp_sum<Acc>(n, lane, [&](int e) { return base(e); }));
      for (int e = lane; e < n; e += 32) sums[e] += base(e) / sum;
    }
    if (lane != 0) return;
    if (args.squares) sums[n + kSumOfSquares] += softmax.lse() * softmax.lse();
    sums[n + kSumOfRows] += Acc(1);
  }
};

// One block for each unit.
template <class Acc>
__global__ void forward_kernel(RouterRows rows, RouterForward args, Memory<Acc> memory) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int n = static_cast<int>(rows.experts), k = static_cast<int>(rows.options.topk);
  const int64_t b = rows.sequences, part = blockIdx.x / b, q = blockIdx.x % b;
  Acc* scores = memory.scores(shared, warp);
  int* chosen = memory.chosen(shared, warps, warp);
  int* counts = memory.block_counts(shared, warps);
  ForwardRow<Acc> row = {
      rows,   args,       static_cast<int>(threadIdx.x) % 32, n,      k,
      scores, scores + n, scores + n + memory.groups,         chosen, chosen + k};
  for (int c = row.lane; c < memory.sums; c += 32) row.sums[c] = 0;
  for (int e = static_cast<int>(threadIdx.x); e < memory.counts; e += static_cast<int>(blockDim.x))
    counts[e] = 0;
  __syncthreads();
  const int64_t positions = rows.rows / b, last = positions * (part + 1) / args.parts;
  for (int64_t t = positions * part / args.parts + warp; t < last; t += warps)
    row.run(t * b + q, counts);
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < memory.counts; e += static_cast<int>(blockDim.x))
    if (counts[e] != 0) atomicAdd(args.counts + q * n + e, counts[e]);
  for (int c = static_cast<int>(threadIdx.x); c < memory.sums; c += static_cast<int>(blockDim.x)) {
    double sum = 0;
    for (int w = 0; w < warps; ++w) sum += (memory.scores(shared, w) + n + memory.groups)[c];
    args.sums[(q * memory.sums + c) * args.parts + part] = sum;
  }
}

// A block of as many warps as fit; of one alone the scores of a row must fit.
template <class Acc, class Kernel>
int warps_for(const Memory<Acc>& memory, Kernel* kernel) {
  int warps = kMostWarps;
  while (warps > 1 && memory.bytes(warps) > kUsualSharedBytes) warps /= 2;
  const size_t bytes = memory.bytes(warps);
  MEGATRON_CHECK(bytes <= kUsualSharedBytes || allow_shared_memory(kernel, bytes), "a router of ",
                 memory.experts, " experts needs ", bytes,
                 " bytes of shared memory, which this device does not have");
  return warps;
}

template <class Acc>
void forward(const RouterRows& rows, const RouterForward& args, void* stream) {
  Memory<Acc> memory = {};
  const int n = static_cast<int>(rows.experts);
  memory.experts = n;
  memory.groups = static_cast<int>(rows.options.num_groups);
  memory.topk = static_cast<int>(rows.options.topk);
  memory.sums = args.sums != nullptr ? n + static_cast<int>(kMoreSums) : 0;
  memory.counts = args.counts != nullptr ? n : 0;
  const int warps = warps_for(memory, forward_kernel<Acc>);
  forward_kernel<Acc>
      <<<static_cast<unsigned>(args.parts * rows.sequences), static_cast<unsigned>(32 * warps),
         memory.bytes(warps), as_stream(stream)>>>(rows, args, memory);
}

// --- Losses, in one block ---

constexpr unsigned kLossThreads = 1024;

template <class Count>
__device__ void assign_shares(const Count* counts, int64_t rows, int64_t experts, int64_t k,
                              double* shares, long long* shared) {
  long long total = 0;
  for (int64_t i = threadIdx.x; i < rows * experts; i += blockDim.x) total += counts[i];
  total = reduce_block(total, AddOp{}, shared);
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    long long sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += counts[r * experts + e];
    shares[e] = static_cast<double>(sum) * static_cast<double>(k) /
                static_cast<double>(total > 1 ? total : 1);
  }
}

__device__ void assign_all_shares(const BalanceLosses& losses, const BalanceForward& args,
                                  long long* shared) {
  const int64_t n = losses.experts, b = losses.sequences;
  double* micro = args.shares + b * n;
  if (args.counts != nullptr) {
    for (int64_t q = 0; q < b; ++q)
      assign_shares(args.counts + q * n, 1, n, losses.topk, args.shares + q * n, shared);
    assign_shares(args.counts, b, n, losses.topk, micro, shared);
  } else {
    for (int64_t i = threadIdx.x; i < (b + 1) * n; i += blockDim.x) args.shares[i] = 0;
  }
  if (args.step_counts != nullptr) {
    assign_shares(args.step_counts, 1, n, losses.topk, micro + n, shared);
  } else {
    for (int64_t e = threadIdx.x; e < n; e += blockDim.x) micro[n + e] = 0;
  }
  __syncthreads();
}

// A warp adds the parts of a column.
__global__ void losses_kernel(BalanceLosses losses, BalanceForward args) {
  __shared__ double shared[33];
  __shared__ long long shared_counts[33];
  const int64_t n = losses.experts, b = losses.sequences, columns = n + kMoreSums;
  const int64_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  assign_all_shares(losses, args, shared_counts);
  const double* micro = args.shares + b * n;
  double total[kBalanceTerms] = {}, rows = 0;
  for (int64_t at = warp; at < b * columns; at += blockDim.x / 32) {
    const int64_t q = at / columns, c = at % columns;
    double sum = 0;
    for (int64_t part = lane; part < args.parts; part += 32)
      sum += args.sums[at * args.parts + part];
    sum = reduce_warp(sum, AddOp{}) * losses.of_sequence[q];
    if (lane != 0) continue;
    if (c < n && args.counts != nullptr) {
      total[kMicroTerm] += sum * micro[c];
      total[kSequenceTerm] += sum * args.shares[q * n + c];
      total[kGlobalTerm] += sum * micro[n + c];
    } else if (c == n + kSumOfSquares) {
      total[kZTerm] += sum;
    } else if (c == n + kSumOfRows) {
      rows += sum;
    }
  }
  rows = reduce_block(rows, AddOp{}, shared);
  const double scale = static_cast<double>(n) / static_cast<double>(losses.topk);
  for (int i = 0; i < kBalanceTerms; ++i) {
    const double sum = reduce_block(total[i], AddOp{}, shared);
    if (threadIdx.x != 0) continue;
    args.weights[i] = losses.coefficient[i] * rows;
    if (args.losses[i] != nullptr)
      *args.losses[i] = losses.coefficient[i] * (i == kZTerm ? 1.0 : scale) * sum;
  }
}

// --- Backward: a warp computes a row ---

template <class Acc>
struct BackwardRow {
  const RouterRows& rows;
  const RouterBackward& args;
  int lane, n, k;
  Acc* dscore;  // memory [n]: the gradient of chosen logits, shares (pre_softmax) or scores
  double grad[kBalanceTerms];
  bool balances, squares;

  __device__ bool is_softmax() const { return rows.options.score == RouterScore::kSoftmax; }
  __device__ bool before() const { return is_softmax() && rows.options.pre_softmax; }

  __device__ void read_gradients() {
    const double scale = static_cast<double>(n) / static_cast<double>(k);
    balances = false;
    for (int i = 0; i < kBalanceTerms; ++i) {
      const bool given = args.dlosses[i] != nullptr;
      grad[i] = given ? *args.dlosses[i] * args.balance.coefficient[i] : 0.0;
      if (i == kZTerm) continue;
      grad[i] *= scale;
      balances = balances || given;
    }
    squares = args.dlosses[kZTerm] != nullptr;
  }

  __device__ void run(int64_t i) {
    const Acc* logits = static_cast<const Acc*>(rows.logits) + i * n;
    Acc* out = static_cast<Acc*>(args.dlogits) + i * n;
    const int64_t q = i % rows.sequences;
    const bool counted = rows.padding == nullptr || !rows.padding[i];
    const bool shares = balances && counted, lse = squares && counted;
    Softmax<Acc> softmax;
    if (lse || (is_softmax() && (shares || before())))
      softmax = softmax_over<Acc>(n, lane, [&](int e) { return logits[e]; });
    for (int e = lane; e < n; e += 32) dscore[e] = 0;
    __syncwarp();
    if (args.dweights != nullptr) weights_backward(i, logits);
    __syncwarp();
    Acc factor = 0;
    if (lse)
      factor = static_cast<Acc>(2 * grad[kZTerm] * args.balance.of_sequence[q]) * softmax.lse();
    if (is_softmax()) {
      softmax_backward(logits, softmax, q, shares, out);
    } else {
      scores_backward(logits, q, shares, out);
    }
    if (!lse) return;
    for (int e = lane; e < n; e += 32) out[e] += factor * softmax.of(logits[e]);
  }

  __device__ void weights_backward(int64_t i, const Acc* logits) const {
    const int32_t* choices = args.choices + i * k;
    const Acc* dw = static_cast<const Acc*>(args.dweights) + i * k;
    const Acc scale = weight_scale<Acc>(rows.options);
    const auto logit = [&](int j) { return logits[choices[j]]; };
    if (before() || (!is_softmax() && k == 1)) {
      for (int j = lane; j < k; j += 32) dscore[choices[j]] = scale * dw[j];
    } else if (is_softmax()) {
      const Softmax<Acc> own = softmax_over<Acc>(k, lane, logit);
      const Acc mean = warp_sum<Acc>(k, lane, [&](int j) { return own.of(logit(j)) * dw[j]; });
      for (int j = lane; j < k; j += 32)
        dscore[choices[j]] = scale * own.of(logit(j)) * (dw[j] - mean);
    } else {
      const auto score = [&](int j) { return expert_score(logit(j), rows.options.score); };
      const Acc sum = with_smallest(warp_sum<Acc>(k, lane, score));
      const Acc mean = warp_sum<Acc>(k, lane, [&](int j) { return score(j) * dw[j]; }) / sum;
      for (int j = lane; j < k; j += 32) dscore[choices[j]] = scale * (dw[j] - mean) / sum;
    }
  }

  // Of the share of expert e, from the losses.
  __device__ Acc dshare(int64_t q, int e, bool shares) const {
    if (!shares) return 0;
    const double* micro = args.shares + args.balance.sequences * n;
    return static_cast<Acc>(args.balance.of_sequence[q] *
                            (grad[kMicroTerm] * micro[e] +
                             grad[kSequenceTerm] * args.shares[q * n + e] +
                             grad[kGlobalTerm] * micro[n + e]));
  }

  __device__ void softmax_backward(const Acc* logits, const Softmax<Acc>& softmax, int64_t q,
                                   bool shares, Acc* out) const {
    if (!shares && !before()) {
      for (int e = lane; e < n; e += 32) out[e] = dscore[e];
      return;
    }
    const auto own = [&](int e) {
      return before() ? dshare(q, e, shares) + dscore[e] : dshare(q, e, shares);
    };
    const Acc mean = warp_sum<Acc>(n, lane, [&](int e) { return softmax.of(logits[e]) * own(e); });
    for (int e = lane; e < n; e += 32) {
      const Acc result = softmax.of(logits[e]) * (own(e) - mean);
      out[e] = before() ? result : dscore[e] + result;
    }
  }

  __device__ void scores_backward(const Acc* logits, int64_t q, bool shares, Acc* out) const {
    const RouterScore kind = rows.options.score;
    const auto score = [&](int e) { return expert_score(logits[e], kind); };
    Acc sum = 1, mean = 0;
    if (shares) {
      sum = with_smallest(warp_sum<Acc>(n, lane, score));
      mean = warp_sum<Acc>(n, lane, [&](int e) { return score(e) * dshare(q, e, true); }) / sum;
    }
    for (int e = lane; e < n; e += 32) {
      Acc own = dscore[e];
      if (shares) own += (dshare(q, e, true) - mean) / sum;
      out[e] = own * score_slope(logits[e], score(e), kind);
    }
  }
};

template <class Acc>
__global__ void backward_kernel(RouterRows rows, RouterBackward args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int n = static_cast<int>(rows.experts);
  BackwardRow<Acc> row = {rows,
                          args,
                          static_cast<int>(threadIdx.x) % 32,
                          n,
                          static_cast<int>(rows.options.topk),
                          reinterpret_cast<Acc*>(shared) + warp * n};
  row.read_gradients();
  const int64_t i = int64_t{blockIdx.x} * warps + warp;
  if (i < rows.rows) row.run(i);
}

template <class Acc>
void backward(const RouterRows& rows, const RouterBackward& args, void* stream) {
  Memory<Acc> memory = {};
  memory.experts = static_cast<int>(rows.experts);
  const int warps = warps_for(memory, backward_kernel<Acc>);
  backward_kernel<Acc>
      <<<static_cast<unsigned>((rows.rows + warps - 1) / warps), static_cast<unsigned>(32 * warps),
         memory.bytes(warps), as_stream(stream)>>>(rows, args);
}

// --- Counts ---

// Adds up in shared memory, if there is room.
template <bool Shared>
__global__ void count_kernel(AssignmentCounts args) {
  extern __shared__ int block_counts[];
  const int64_t cells = args.sequences * args.experts;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if constexpr (Shared) {
    for (int64_t c = threadIdx.x; c < cells; c += blockDim.x) block_counts[c] = 0;
    __syncthreads();
  }
  for (int64_t at = first; at < args.rows * args.topk; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t i = at / args.topk, expert = args.choices[at];
    if (expert < 0 || (args.padding != nullptr && args.padding[i]) ||
        (args.kept != nullptr && !args.kept[at]))
      continue;
    const int64_t cell = i % args.sequences * args.experts + expert;
    atomicAdd(Shared ? block_counts + cell : args.counts + cell, 1);
  }
  if constexpr (Shared) {
    __syncthreads();
    for (int64_t c = threadIdx.x; c < cells; c += blockDim.x)
      if (block_counts[c] != 0) atomicAdd(args.counts + c, block_counts[c]);
  }
}

template <class F>
void with_router_type(DType dtype, const F& f) {
  if (dtype == DType::kFloat64) {
    f(double{});
  } else {
    f(float{});
  }
}

}  // namespace

void router_forward_cuda(const RouterRows& rows, const RouterForward& args, void* stream) {
  with_router_type(rows.dtype, [&](auto type) { forward<decltype(type)>(rows, args, stream); });
  check_cuda(cudaGetLastError(), "router");
}

void balance_losses_cuda(const BalanceLosses& losses, const BalanceForward& args, void* stream) {
  losses_kernel<<<1, kLossThreads, 0, as_stream(stream)>>>(losses, args);
  check_cuda(cudaGetLastError(), "losses of a router");
}

void router_backward_cuda(const RouterRows& rows, const RouterBackward& args, void* stream) {
  with_router_type(rows.dtype, [&](auto type) { backward<decltype(type)>(rows, args, stream); });
  check_cuda(cudaGetLastError(), "router backward");
}

void count_assignments_cuda(const AssignmentCounts& args, void* stream) {
  constexpr int64_t kPerThread = 8;
  const size_t bytes = sizeof(int) * static_cast<size_t>(args.sequences * args.experts);
  const unsigned blocks =
      std::min(512u, blocks_for((args.rows * args.topk + kPerThread - 1) / kPerThread));
  if (bytes <= kUsualSharedBytes) {
    count_kernel<true><<<blocks, kThreads, bytes, as_stream(stream)>>>(args);
  } else {
    count_kernel<false><<<blocks, kThreads, 0, as_stream(stream)>>>(args);
  }
  check_cuda(cudaGetLastError(), "counts of assignments");
}

}  // namespace megatron
