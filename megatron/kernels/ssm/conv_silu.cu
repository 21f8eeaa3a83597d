#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/ssm/conv_silu.h"

namespace megatron {
namespace {

using bf16 = __nv_bfloat16;

// A thread computes kSize neighbouring channels of a run of tokens of one sample.
constexpr int kForwardRun = 64, kConvThreads = 128;
constexpr int kForwardSize = 4, kBackwardSize = 4;  // channels of a thread
constexpr int kAhead = 4;  // rows that a thread loads together, while it computes those before

// kSize bf16 as they lie.
template <int kSize>
struct Words;
template <>
struct Words<8> {
  using type = uint4;
};
template <>
struct Words<4> {
  using type = uint2;
};

template <>
struct Words<2> {
  using type = uint32_t;
};
template <int kSize>
__device__ __forceinline__ typename Words<kSize>::type load_words(const bf16* from) {
  return *reinterpret_cast<const typename Words<kSize>::type*>(from);
}
template <int kSize>
__device__ __forceinline__ void unpack_words(const typename Words<kSize>::type& words,
                                             float (&to)[kSize]) {
  uint32_t pairs[kSize / 2];
  memcpy(pairs, &words, sizeof words);
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    to[2 * i] = __uint_as_float(pairs[i] << 16);
    to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
template <int kSize>
__device__ __forceinline__ void store_channels(bf16* to, const float (&from)[kSize]) {
  typename Words<kSize>::type words;
  uint32_t pairs[kSize / 2];
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
  memcpy(&words, pairs, sizeof words);
  *reinterpret_cast<typename Words<kSize>::type*>(to) = words;
}

__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }

// What a thread works on, and the weights of its channels.
template <int kWidth, int kSize>
struct ConvTask {
  using Row = typename Words<kSize>::type;
  const ConvSiluArgs& args;
  int channel, first, end;  // tokens [first, end)
  int64_t sample;
  float weight[kWidth][kSize], bias[kSize];

  __device__ ConvTask(const ConvSiluArgs& a, int run) : args(a) {
    channel = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kSize;
    first = static_cast<int>(blockIdx.y) * run;
    end = min(first + run, static_cast<int>(a.tokens));
    sample = blockIdx.z;
    if (channel >= a.channels) return;
    // kSize channels of kWidth taps lie one after another.
    const bf16* const w = static_cast<const bf16*>(a.weight) + int64_t{channel} * kWidth;
#pragma unroll
    for (int part = 0; part < kWidth; ++part) {
      float taps[kSize];
      unpack_words<kSize>(load_words<kSize>(w + part * kSize), taps);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int at = part * kSize + i;
        weight[at % kWidth][at / kWidth] = taps[i];
      }
    }
#pragma unroll
    for (float& x : bias) x = 0.0f;
    if (a.bias)
      unpack_words<kSize>(load_words<kSize>(static_cast<const bf16*>(a.bias) + channel), bias);
  }
  __device__ bool empty() const { return channel >= args.channels || first >= end; }
  __device__ bf16* at(const ScanRows& rows, int token) const {
    return static_cast<bf16*>(rows.data) + token * rows.token + sample * rows.sample + channel;
  }
  __device__ bool starts(int token) const {
    const ScanDocuments& d = args.documents;
    if (!d.ids || token < 1 - (args.documents_before ? kWidth - 1 : 0) || token >= args.tokens)
      return false;
    return id(token) != id(token - 1);
  }
  __device__ int64_t id(int token) const {
    const ScanDocuments& d = args.documents;
    if (token < 0 && args.documents_before)
      return args.documents_before[max(token + kWidth - 1, 0) * d.token + sample * d.sample];
    return d.ids[max(token, 0) * d.token + sample * d.sample];
  }
  // The rows before `first`, zero beyond a border; returns how many of them are of the document of
  // the last.
  template <int kRows>
  __device__ int window(float (&rows)[kRows][kSize]) const {
    int count = kWidth - 1;
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) {
      const int token = first - (kWidth - 1) + j;
      if (j > 0 && starts(token)) {
        clear<0>(rows, j);
        count = kWidth - 1 - j;
      }
      Row row{};
      if (token >= 0)
        row = load_words<kSize>(at(args.u, token));
      else if (args.before.data)
        row = load_words<kSize>(at(args.before, token + kWidth - 1));
      unpack_words<kSize>(row, rows[j]);
    }
    return count;
  }
  // Zeros in rows [kFrom, to).
  template <int kFrom, int kRows>
  __device__ static void clear(float (&rows)[kRows][kSize], int to) {
#pragma unroll
    for (int j = kFrom; j < kRows; ++j) {
      if (j >= to) break;
#pragma unroll
      for (float& x : rows[j]) x = 0.0f;
    }
  }
};

// Row kBefore + r of `rows` is the r-th of the kAhead that are computed; the kBefore in front are
// those before.
template <int kWidth, int kSize>
__global__ void __launch_bounds__(kConvThreads)
    conv_forward(const __grid_constant__ ConvSiluArgs args) {
  constexpr int kBefore = kWidth - 1;
  const ConvTask<kWidth, kSize> task(args, kForwardRun);
  if (task.empty()) return;
  typename Words<kSize>::type next[kAhead] = {};
  const auto fetch = [&](int token) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (token + r < task.end) next[r] = load_words<kSize>(task.at(args.u, token + r));
    }
  };
  fetch(task.first);
  float rows[kBefore + kAhead][kSize];
  task.window(rows);
  for (int token = task.first; token < task.end; token += kAhead) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) unpack_words<kSize>(next[r], rows[kBefore + r]);
    fetch(token + kAhead);
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (token + r >= task.end) break;
      if (task.starts(token + r)) task.template clear<0>(rows, kBefore + r);
      float y[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        float a = task.bias[i];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) a += task.weight[k][i] * rows[r + k][i];
        y[i] = a * sigmoid(a);
      }
      store_channels(task.at(args.y, token + r), y);
    }
#pragma unroll
    for (int j = 0; j < kBefore; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) rows[j][i] = rows[kAhead + j][i];
    }
  }
}

// A run reads kWidth - 1 rows more at each end.
constexpr int kBackwardResident = 3;  // blocks of a multiprocessor that its registers suffice for
template <int kWidth, int kSize>
__global__ void __launch_bounds__(kConvThreads, kBackwardResident)
    conv_backward(const __grid_constant__ ConvSiluArgs args, int run) {
  constexpr int kBefore = kWidth - 1;
  using Row = typename Words<kSize>::type;
  const ConvTask<kWidth, kSize> task(args, run);
  if (task.empty()) return;
  const int last = task.end + kBefore;
  Row next[kAhead], next_dy[kAhead];
  const auto fetch = [&](int token) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      next[r] = next_dy[r] = Row{};
      if (token + r >= min(last, static_cast<int>(args.tokens))) continue;
      next[r] = load_words<kSize>(task.at(args.u, token + r));
      next_dy[r] = load_words<kSize>(task.at(args.dy, token + r));
    }
  };
  fetch(task.first);
  // open[q]: the gradient of row q of `rows`, as far as it is summed.
  float rows[kBefore + kAhead][kSize], open[kBefore + kAhead][kSize] = {};
  float dweight[kWidth][kSize] = {}, dbias[kSize] = {};
  int seen = task.window(rows);  // rows before this one in its document, at most kBefore
  for (int token = task.first; token < last; token += kAhead) {
    float dy[kAhead][kSize];
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      unpack_words<kSize>(next[r], rows[kBefore + r]);
      unpack_words<kSize>(next_dy[r], dy[r]);
    }
    fetch(token + kAhead);
#pragma unroll
    for (int r = 0; r < kAhead; ++r) {
      if (task.starts(token + r)) {
        task.template clear<0>(rows, kBefore + r);
        seen = 0;
      }
      const float mine = token + r < task.end ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        float a = task.bias[i];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) a += task.weight[k][i] * rows[r + k][i];
        const float gate = sigmoid(a);
        const float da = dy[r][i] * gate * (1.0f + a * (1.0f - gate));
        open[r + kBefore][i] += task.weight[kBefore][i] * da;
        if (seen == kBefore) {
#pragma unroll
          for (int k = 0; k < kBefore; ++k) open[r + k][i] += task.weight[k][i] * da;
        } else {
#pragma unroll
          for (int k = 0; k < kBefore; ++k) {
            if (kBefore - k <= seen) open[r + k][i] += task.weight[k][i] * da;
          }
        }
        const float own = mine * da;
        dbias[i] += own;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) dweight[k][i] += own * rows[r + k][i];
      }
      seen = min(seen + 1, kBefore);
      const int done = token + r - kBefore;
      if (done >= task.first) {
        if (done < task.end) store_channels(task.at(args.du, done), open[r]);
      } else if (task.first == 0 && args.dbefore.data) {
        store_channels(task.at(args.dbefore, done + kBefore), open[r]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBefore + kAhead; ++j) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (j < kBefore) rows[j][i] = rows[kAhead + j][i];
        open[j][i] = j < kBefore ? open[kAhead + j][i] : 0.0f;
      }
    }
  }
  const int64_t block = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  const int64_t blocks = int64_t{gridDim.z} * gridDim.y;
  float* const weights = args.workspace + (block * args.channels + task.channel) * kWidth;
  float* const biases =
      args.workspace + blocks * args.channels * kWidth + block * args.channels + task.channel;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) weights[i * kWidth + k] = dweight[k][i];
    biases[i] = dbias[i];
  }
}

int64_t blocks_of_channels(const ConvSiluArgs& args, int size) {
  return (args.channels / size + kConvThreads - 1) / kConvThreads;
}

int64_t runs_of_tokens(const ConvSiluArgs& args, int64_t run) {
  return (args.tokens + run - 1) / run;
}

template <class Kernel, class... More>
void launch_conv(const ConvSiluArgs& args, Kernel kernel, int size, int64_t run, void* stream,
                 More... more) {
  const dim3 grid(static_cast<unsigned>(blocks_of_channels(args, size)),
                  static_cast<unsigned>(runs_of_tokens(args, run)),
                  static_cast<unsigned>(args.samples));
  kernel<<<grid, kConvThreads, 0, as_stream(stream)>>>(args, more...);
  check_cuda(cudaGetLastError(), "the convolution of a state-space layer");
}

// Tokens of a run of the backward: about 128, so that the blocks fill the device a whole number of
// times.
int64_t backward_run(const ConvSiluArgs& args) {
  constexpr int64_t kWanted = 128, kDevice = int64_t{132} * kBackwardResident;
  const int64_t columns = blocks_of_channels(args, kBackwardSize) * args.samples;
  const int64_t blocks = columns * runs_of_tokens(args, kWanted);
  if (blocks <= kDevice) return kWanted;  // also without samples
  const int64_t runs = blocks / kDevice * kDevice / columns;
  return runs == 0 ? kWanted : (args.tokens + runs - 1) / runs;
}

int64_t backward_blocks(const ConvSiluArgs& args) {
  return args.samples * runs_of_tokens(args, backward_run(args));
}

template <int kWidth>
void launch_backward(const ConvSiluArgs& args, void* stream) {
  const int64_t run = backward_run(args);
  launch_conv(args, conv_backward<kWidth, kBackwardSize>, kBackwardSize, run, stream,
              static_cast<int>(run));
}

}  // namespace

int64_t conv_silu_workspace(const ConvSiluArgs& args) {
  return backward_blocks(args) * args.channels * (args.width + 1);
}

void conv_silu_forward_cuda(const ConvSiluArgs& args, void* stream) {
  if (args.tokens == 0 || args.samples == 0) return;
  switch (args.width) {
    case 2:
      return launch_conv(args, conv_forward<2, kForwardSize>, kForwardSize, kForwardRun, stream);
    case 3:
      return launch_conv(args, conv_forward<3, kForwardSize>, kForwardSize, kForwardRun, stream);
    default:
      return launch_conv(args, conv_forward<4, kForwardSize>, kForwardSize, kForwardRun, stream);
  }
}

void conv_silu_backward_cuda(const ConvSiluArgs& args, void* stream) {
  if (args.tokens > 0 && args.samples > 0) {
    switch (args.width) {
      case 2:
        launch_backward<2>(args, stream);
        break;
      case 3:
        launch_backward<3>(args, stream);
        break;
      default:
        launch_backward<4>(args, stream);
    }
  }
  PartialSum sum;
  sum.blocks = backward_blocks(args);
  sum.columns = args.channels * args.width;
  sum.partial = args.workspace;
  sum.beta = 0.0;
  sum.target = args.dweight;
  partial_sum_cuda(sum, stream);
  if (!args.dbias) return;
  sum.partial = args.workspace + sum.blocks * sum.columns;
  sum.columns = args.channels;
  sum.target = args.dbias;
  partial_sum_cuda(sum, stream);
}

}  // namespace megatron
