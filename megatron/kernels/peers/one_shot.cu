#include <algorithm>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/peers/one_shot.h"

namespace megatron {
namespace {

constexpr int kLines =
    static_cast<int>(kOneShotChannelBytes / kOneShotValueBytes);  // a thread each
// All of a GPU's multiprocessors hold that many blocks at a time, beside others.
constexpr int64_t kMostBlocks = 512;

struct alignas(8) Value {
  uint32_t low, high;
};

__device__ __forceinline__ void send_line(uint4* to, Value value, uint32_t call) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(value.low), "r"(call), "r"(value.high), "r"(call)
               : "memory");
}

__device__ __forceinline__ Value await_line(const uint4* from, uint32_t call) {
  uint4 line;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
                 : "l"(from)
                 : "memory");
  } while (line.y != call || line.w != call);
  return {line.x, line.z};
}

// This block's part of a channel in one call.
class Channel {
 public:
  __device__ Channel(const OneShotLinks& links, int64_t number)
      : links_(links),
        number_(number),
        call_(*static_cast<volatile uint32_t*>(links.calls + number) + 1) {}

  __device__ void send(int to, Value value) const {
    send_line(place(to, links_.rank), value, call_);
  }
  __device__ Value await(int from) const { return await_line(place(links_.rank, from), call_); }
  // All threads have what they need.
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) links_.calls[number_] = call_;
  }

 private:
  __device__ uint4* place(int inbox, int sender) const {
    const int64_t line = ((2 * number_ + (call_ & 1)) * links_.ranks + sender) * kLines;
    return static_cast<uint4*>(links_.inboxes[inbox]) + line + threadIdx.x;
  }

  const OneShotLinks& links_;
  const int64_t number_;
  const uint32_t call_;
};

template <class T>
struct Elements {
  static constexpr int kSize = static_cast<int>(kOneShotValueBytes / sizeof(T));
  T at[kSize];
};

template <class To, class From>
__device__ __forceinline__ To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// The unsigned integer of as many bytes, which can be read as volatile.
template <size_t Bytes>
struct BitsOf;
template <>
struct BitsOf<1> {
  using type = uint8_t;
};
template <>
struct BitsOf<2> {
  using type = uint16_t;
};
template <>
struct BitsOf<4> {
  using type = uint32_t;
};
template <>
struct BitsOf<8> {
  using type = uint64_t;
};

// Up to 8 bytes from element `first` on; `packed`: all groups are whole and aligned.
template <class T>
__device__ __forceinline__ Elements<T> load_elements(const void* from, int64_t first, int64_t count,
                                                     bool packed) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  const Bits* const begin = static_cast<const Bits*>(from) + first;
  // Not from the L1 cache: a kernel that begins early may find it filled before the write
  if (packed) return same_bits<Elements<T>>(__ldcg(reinterpret_cast<const uint2*>(begin)));
  Elements<Bits> bits{};
  for (int i = 0; i < Elements<T>::kSize && first + i < count; ++i)
    bits.at[i] = *static_cast<const volatile Bits*>(begin + i);
  return same_bits<Elements<T>>(bits);
}

template <class T>
__device__ __forceinline__ void store_elements(void* to, int64_t first, int64_t count, bool packed,
                                               const Elements<T>& elements) {
  T* const begin = static_cast<T*>(to) + first;
  if (packed) {
    *reinterpret_cast<uint2*>(begin) = same_bits<uint2>(elements);
  } else {
    for (int i = 0; i < Elements<T>::kSize && first + i < count; ++i) begin[i] = elements.at[i];
  }
}

template <class T>
struct SummedAs {
  using type = AccumulateType<T>;
};
template <>
struct SummedAs<int32_t> {
  using type = int32_t;
};
template <>
struct SummedAs<int64_t> {
  using type = int64_t;
};

template <class T, class Sum>
__device__ __forceinline__ Sum wide(const T& x) {
  if constexpr (std::is_integral_v<T>) {
    return x;
  } else {
    return load_as<Sum>(x);
  }
}
template <class T, class Sum>
__device__ __forceinline__ T narrow(Sum x) {
  if constexpr (std::is_integral_v<T>) {
    return x;
  } else {
    T rounded;
    store_as(rounded, x);
    return rounded;
  }
}

// Combines what the others send with this rank's own elements, in the order of ranks.
template <class T, bool Max>
__device__ Elements<T> combine(const Channel& channel, const OneShotLinks& links,
                               const Elements<T>& own) {
  using Sum = typename SummedAs<T>::type;
  constexpr int kSize = Elements<T>::kSize;
  Sum total[kSize] = {};
  for (int from = 0; from < links.ranks; ++from) {
    const auto part = from == links.rank ? own : same_bits<Elements<T>>(channel.await(from));
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Sum x = wide<T, Sum>(part.at[i]);
      if constexpr (Max) {
        total[i] = from == 0 || x > total[i] || x != x ? x : total[i];
      } else {
        total[i] = from == 0 ? x : total[i] + x;
      }
    }
  }
  Elements<T> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.at[i] = narrow<T>(total[i]);
  return result;
}

template <class T, bool Max>
__global__ void __launch_bounds__(kLines)
    reduction_kernel(const __grid_constant__ OneShotReduction a, int64_t channels, bool packed) {
  constexpr int kSize = Elements<T>::kSize;
  wait_for_kernel_ahead();
  let_next_kernel_begin();
  const OneShotLinks& links = a.links;
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    const Channel channel(links, c);
    const int64_t first = (c * kLines + threadIdx.x) * kSize;
    if (first < a.count) {
      const auto own = load_elements<T>(a.values, first, a.count, packed);
      const auto send_to_others = [&](const Elements<T>& elements) {
        for (int step = 1; step < links.ranks; ++step)
          channel.send((links.rank + step) % links.ranks, same_bits<Value>(elements));
      };
      const int owner = a.divided ? static_cast<int>(c % links.ranks) : links.rank;
      Elements<T> result;
      if (owner != links.rank) {
        channel.send(owner, same_bits<Value>(own));
        result = same_bits<Elements<T>>(channel.await(owner));
      } else {
        if (!a.divided) send_to_others(own);
        result = combine<T, Max>(channel, links, own);
        if (a.divided) send_to_others(result);
      }
      if constexpr (!std::is_integral_v<T>) {
        if (a.addend != nullptr) {
          using Sum = typename SummedAs<T>::type;
          const auto more = load_elements<T>(a.addend, first, a.count, packed);
#pragma unroll
          for (int i = 0; i < kSize; ++i)
            result.at[i] = narrow<T>(wide<T, Sum>(result.at[i]) + wide<T, Sum>(more.at[i]));
        }
      }
      store_elements<T>(a.out, first, a.count, packed, result);
    }
    channel.end();
  }
}

__global__ void __launch_bounds__(kLines)
    gather_kernel(const __grid_constant__ OneShotGather a, int64_t channels, bool packed) {
  wait_for_kernel_ahead();
  let_next_kernel_begin();
  const OneShotLinks& links = a.links;
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    const Channel channel(links, c);
    const int64_t first = (c * kLines + threadIdx.x) * kOneShotValueBytes;
    if (first < a.bytes) {
      const auto own = load_elements<uint8_t>(a.values, first, a.bytes, packed);
      for (int step = 1; step < links.ranks; ++step)
        channel.send((links.rank + step) % links.ranks, same_bits<Value>(own));
      for (int step = 0; step < links.ranks; ++step) {
        const int from = (links.rank + step) % links.ranks;
        const auto part = step == 0 ? own : same_bits<Elements<uint8_t>>(channel.await(from));
        store_elements<uint8_t>(static_cast<uint8_t*>(a.out) + from * a.bytes, first, a.bytes,
                                packed, part);
      }
    }
    channel.end();
  }
}

bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::ranges::all_of(pointers, [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kOneShotValueBytes == 0;
  });
}

template <class Kernel, class Args>
void start(Kernel kernel, const Args& args, int64_t bytes, bool packed, void* stream,
           const char* what) {
  if (bytes == 0) return;
  MEGATRON_ASSERT(args.links.ranks <= kMostOneShotRanks, what, " over ", args.links.ranks,
                  " ranks");
  const int64_t channels = (bytes + kOneShotChannelBytes - 1) / kOneShotChannelBytes;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(kMostBlocks, channels)));
  config.blockDim = dim3(kLines);
  config.stream = as_stream(stream);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = is_hopper() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, channels, packed), what);
}

template <class T>
void reduce(const OneShotReduction& args, void* stream) {
  const auto bytes = args.count * static_cast<int64_t>(sizeof(T));
  const bool packed =
      bytes % kOneShotValueBytes == 0 && are_aligned({args.values, args.addend, args.out});
  const auto kernel =
      args.op == OneShotOp::kMax ? reduction_kernel<T, true> : reduction_kernel<T, false>;
  start(kernel, args, bytes, packed, stream, "a reduction over the memory of peers");
}

}  // namespace

void one_shot_reduction_cuda(const OneShotReduction& args, void* stream) {
  if (args.dtype == DType::kInt32) return reduce<int32_t>(args, stream);
  if (args.dtype == DType::kInt64) return reduce<int64_t>(args, stream);
  with_cuda_type(args.dtype, [&](auto type) { reduce<decltype(type)>(args, stream); });
}

void one_shot_gather_cuda(const OneShotGather& args, void* stream) {
  const bool packed = args.bytes % kOneShotValueBytes == 0 && are_aligned({args.values, args.out});
  start(gather_kernel, args, args.bytes, packed, stream, "a gather over the memory of peers");
}

}  // namespace megatron
