#include <algorithm>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/peers/one_shot.h"

namespace megatron {
namespace {

constexpr int kThreadBytes = 16;
constexpr int kThreadsOfLine = static_cast<int>(kOneShotLineBytes / kThreadBytes);
constexpr int kValuesOfLine = static_cast<int>(kOneShotValueBytes / kThreadBytes);  // by threads
constexpr int kThreads = static_cast<int>(kOneShotLines) * kThreadsOfLine;
static_assert(kValuesOfLine + 1 == kThreadsOfLine, "the last thread of a line has the number");
// All of a GPU's multiprocessors hold that many blocks at a time, beside others.
constexpr int64_t kMostBlocks = 512;
// A block sends what it has of so many channels before it waits for the first.
constexpr int kChannelsAtOnce = 4;

using Value = uint4;

// By all threads of a warp.
__device__ __forceinline__ void send_line(uint4* to, const Value& value) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ Value await_line(const uint4* from, uint32_t call) {
  const bool tells = threadIdx.x % kThreadsOfLine == kValuesOfLine;
  Value line;
  do {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
                 : "l"(from)
                 : "memory");
  } while (__any_sync(0xffffffffu, tells && (line.x != call || line.w != call)));
  return line;
}

// This thread's place among the values of a channel, in bytes; threads with the number have none.
__device__ __forceinline__ int64_t byte_in_channel() {
  return (threadIdx.x / kThreadsOfLine) * kOneShotValueBytes +
         (threadIdx.x % kThreadsOfLine) * kThreadBytes;
}
__device__ __forceinline__ bool has_values() {
  return threadIdx.x % kThreadsOfLine < kValuesOfLine;
}

// This block's part of a channel in one call.
class Channel {
 public:
  __device__ Channel(const OneShotLinks& links, int64_t number)
      : links_(links),
        number_(number),
        call_(*static_cast<volatile uint32_t*>(links.calls + number) + 1) {}

  __device__ void send(int to, const Value& value) const {
    send_line(place(to, links_.rank), has_values() ? value : Value{call_, call_, call_, call_});
  }
  __device__ void send_to_others(const Value& value) const {
    for (int step = 1; step < links_.ranks; ++step)
      send((links_.rank + step) % links_.ranks, value);
  }
  __device__ Value await(int from) const { return await_line(place(links_.rank, from), call_); }
  // By one thread, when all have what they need.
  __device__ void end() const { links_.calls[number_] = call_; }

 private:
  __device__ uint4* place(int inbox, int sender) const {
    const int64_t part = (2 * number_ + (call_ & 1)) * links_.ranks + sender;
    return static_cast<uint4*>(links_.inboxes[inbox]) + part * kThreads + threadIdx.x;
  }

  const OneShotLinks& links_;
  const int64_t number_;
  const uint32_t call_;
};

template <class T>
struct Elements {
  static constexpr int kSize = static_cast<int>(kThreadBytes / sizeof(T));
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

// Up to 16 bytes from element `first` on; `packed`: all groups are whole and aligned.
template <class T>
__device__ __forceinline__ Elements<T> load_elements(const void* from, int64_t first, int64_t count,
                                                     bool packed) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  const Bits* const begin = static_cast<const Bits*>(from) + first;
  // Not from the L1 cache: a kernel that begins early may find it filled before the write
  if (packed) return same_bits<Elements<T>>(__ldcg(reinterpret_cast<const uint4*>(begin)));
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
    *reinterpret_cast<uint4*>(begin) = same_bits<uint4>(elements);
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

// This thread's elements of a channel.
template <class T>
struct Place {
  int64_t first;
  bool inside;

  __device__ Place(int64_t channel, int64_t count)
      : first((channel * kOneShotChannelBytes + byte_in_channel()) /
              static_cast<int64_t>(sizeof(T))),
        inside(has_values() && first < count) {}
};

template <class T, bool Max>
__global__ void __launch_bounds__(kThreads)
    reduction_kernel(const __grid_constant__ OneShotReduction a, int64_t channels, bool packed) {
  wait_for_kernel_ahead();
  let_next_kernel_begin();
  const OneShotLinks& links = a.links;
  const auto owner_of = [&](int64_t channel) {
    return a.divided ? static_cast<int>(channel % links.ranks) : links.rank;
  };
  const int64_t stride = gridDim.x;
  // f(channel, turn) for each channel of a round
  const auto for_each = [&](int64_t begin, const auto& f) {
#pragma unroll
    for (int i = 0; i < kChannelsAtOnce; ++i)
      if (begin + i * stride < channels) f(begin + i * stride, i);
  };
  for (int64_t begin = blockIdx.x; begin < channels; begin += kChannelsAtOnce * stride) {
    Elements<T> values[kChannelsAtOnce];
    for_each(begin, [&](int64_t c, int i) {
      const Place<T> place(c, a.count);
      values[i] = {};
      if (place.inside) values[i] = load_elements<T>(a.values, place.first, a.count, packed);
      if constexpr (!std::is_integral_v<T>) {
        if (place.inside && a.factors != nullptr) {
          using Sum = typename SummedAs<T>::type;
          const Sum factor = __ldcg(a.factors + place.first / a.row);
#pragma unroll
          for (int k = 0; k < Elements<T>::kSize; ++k)
            values[i].at[k] = narrow<T>(wide<T, Sum>(values[i].at[k]) * factor);
        }
      }
    });
    for_each(begin, [&](int64_t c, int i) {
      const Channel channel(links, c);
      const auto own = same_bits<Value>(values[i]);
      if (owner_of(c) != links.rank)
        channel.send(owner_of(c), own);
      else if (!a.divided)
        channel.send_to_others(own);
    });
    for_each(begin, [&](int64_t c, int i) {
      if (owner_of(c) != links.rank) return;
      const Channel channel(links, c);
      values[i] = combine<T, Max>(channel, links, values[i]);
      if (a.divided) channel.send_to_others(same_bits<Value>(values[i]));
    });
    for_each(begin, [&](int64_t c, int i) {
      const Place<T> place(c, a.count);
      if (owner_of(c) != links.rank)
        values[i] = same_bits<Elements<T>>(Channel(links, c).await(owner_of(c)));
      if (!place.inside) return;
      if constexpr (!std::is_integral_v<T>) {
        if (a.addend != nullptr) {
          using Sum = typename SummedAs<T>::type;
          const auto more = load_elements<T>(a.addend, place.first, a.count, packed);
#pragma unroll
          for (int k = 0; k < Elements<T>::kSize; ++k)
            values[i].at[k] = narrow<T>(wide<T, Sum>(values[i].at[k]) + wide<T, Sum>(more.at[k]));
        }
      }
      store_elements<T>(a.out, place.first, a.count, packed, values[i]);
    });
    __syncthreads();
    if (threadIdx.x == 0) for_each(begin, [&](int64_t c, int) { Channel(links, c).end(); });
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ OneShotGather a, int64_t channels, bool packed) {
  wait_for_kernel_ahead();
  let_next_kernel_begin();
  const OneShotLinks& links = a.links;
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    const Channel channel(links, c);
    const Place<uint8_t> place(c, a.bytes);
    Elements<uint8_t> own{};
    if (place.inside) own = load_elements<uint8_t>(a.values, place.first, a.bytes, packed);
    channel.send_to_others(same_bits<Value>(own));
    for (int step = 0; step < links.ranks; ++step) {
      const int from = (links.rank + step) % links.ranks;
      const auto part = step == 0 ? own : same_bits<Elements<uint8_t>>(channel.await(from));
      if (place.inside)
        store_elements<uint8_t>(static_cast<uint8_t*>(a.out) + from * a.bytes, place.first, a.bytes,
                                packed, part);
    }
    __syncthreads();
    if (threadIdx.x == 0) channel.end();
  }
}

bool are_aligned(std::initializer_list<const void*> pointers) {
  return std::ranges::all_of(pointers, [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kThreadBytes == 0;
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
  config.blockDim = dim3(kThreads);
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
      bytes % kThreadBytes == 0 && are_aligned({args.values, args.addend, args.out});
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
  const bool packed = args.bytes % kThreadBytes == 0 && are_aligned({args.values, args.out});
  start(gather_kernel, args, args.bytes, packed, stream, "a gather over the memory of peers");
}

}  // namespace megatron
