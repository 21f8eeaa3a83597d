// Element types, reductions and launch helpers shared by the CUDA kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "megatron/base/check.h"
#include "megatron/base/dtype.h"

namespace megatron {

// Throws Error with the name of the call, CUDA's text and its debug variable.
inline void check_cuda(cudaError_t status, const char* call) {
  MEGATRON_CHECK(status == cudaSuccess, call, " failed: ", cudaGetErrorName(status), ", ",
                 cudaGetErrorString(status),
                 "\nhint: CUDA_LAUNCH_BLOCKING=1 shows the call that failed first");
}

// The type in which sums and statistics of T are computed.
template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using AccumulateType = typename Accumulate<T>::type;

// f(T{}) with the CUDA type of a floating dtype.
template <class F>
void with_cuda_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    default:
      MEGATRON_ASSERT(false, "no CUDA kernel for ", to_string(dtype));
  }
}

template <class Acc>
__device__ __forceinline__ Acc load_as(const double& x) {
  return static_cast<Acc>(x);
}
template <class Acc>
__device__ __forceinline__ Acc load_as(const float& x) {
  return static_cast<Acc>(x);
}
template <class Acc>
__device__ __forceinline__ Acc load_as(const __nv_bfloat16& x) {
  return static_cast<Acc>(__bfloat162float(x));
}
template <class Acc>
__device__ __forceinline__ Acc load_as(const __half& x) {
  return static_cast<Acc>(__half2float(x));
}

template <class Acc>
__device__ __forceinline__ void store_as(double& out, Acc x) {
  out = static_cast<double>(x);
}
template <class Acc>
__device__ __forceinline__ void store_as(float& out, Acc x) {
  out = static_cast<float>(x);
}
template <class Acc>
__device__ __forceinline__ void store_as(__nv_bfloat16& out, Acc x) {
  out = __float2bfloat16_rn(static_cast<float>(x));
}
template <class Acc>
__device__ __forceinline__ void store_as(__half& out, Acc x) {
  out = __float2half_rn(static_cast<float>(x));
}

// 16 bytes of elements, one load or store of a thread.
template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T at[kSize];
};
// One element with the interface of a Pack.
template <class T>
struct Single {
  static constexpr int kSize = 1;
  T at[1];
};
template <class Group, class T>
__device__ __forceinline__ Group load_group(const T* from) {
  return *reinterpret_cast<const Group*>(from);
}
template <class Group, class T>
__device__ __forceinline__ void store_group(T* to, const Group& group) {
  // The compiler would split a store of 16-bit elements; this one stays whole.
  if constexpr (sizeof(Group) == sizeof(uint4)) {
    uint4 words;
    memcpy(&words, &group, sizeof words);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else {
    *reinterpret_cast<Group*>(to) = group;
  }
}

// A pack as raw words, for values that wait: as separate 16-bit elements each would take its own
// register.
template <class T>
__device__ __forceinline__ void unpack(const uint4& words,
                                       AccumulateType<T> (&to)[Pack<T>::kSize]) {
  const uint32_t from[4] = {words.x, words.y, words.z, words.w};
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to[i] = __hiloint2double(static_cast<int>(from[2 * i + 1]), static_cast<int>(from[2 * i]));
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(from[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(from[i] << 16);
      to[2 * i + 1] = __uint_as_float(from[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      __half2 two;
      memcpy(&two, &from[i], sizeof two);
      to[2 * i] = __low2float(two);
      to[2 * i + 1] = __high2float(two);
    }
  }
}
template <class T>
__device__ __forceinline__ uint4 pack_words(const AccumulateType<T> (&from)[Pack<T>::kSize]) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) store_as(pack.at[i], from[i]);
  uint4 words;
  memcpy(&words, &pack, sizeof words);
  return words;
}

// Loads and stores for data that this kernel touches only once: loads do not evict others from the
// L1 cache, and stored lines are the first to leave the L2 cache.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}
__device__ __forceinline__ void store_once(void* to, const uint4& words) {
  __stcs(static_cast<uint4*>(to), words);
}

// N consecutive elements of an aligned array, 16 bytes per load or store: with scalars a warp would
// touch each line N times.
template <int N, class Acc>
__device__ __forceinline__ void load_run(const Acc* from, Acc (&to)[N]) {
  static_assert(N % Pack<Acc>::kSize == 0);
#pragma unroll
  for (int i = 0; i < N; i += Pack<Acc>::kSize) {
    const Pack<Acc> pack = load_group<Pack<Acc>>(from + i);
#pragma unroll
    for (int j = 0; j < Pack<Acc>::kSize; ++j) to[i + j] = pack.at[j];
  }
}
template <int N, class Acc>
__device__ __forceinline__ void store_run(Acc* to, const Acc (&from)[N]) {
  static_assert(N % Pack<Acc>::kSize == 0);
#pragma unroll
  for (int i = 0; i < N; i += Pack<Acc>::kSize) {
    Pack<Acc> pack;
#pragma unroll
    for (int j = 0; j < Pack<Acc>::kSize; ++j) pack.at[j] = from[i + j];
    store_group(to + i, pack);
  }
}

// Whether rows of `columns` elements of T can be accessed as packs from every pointer; null
// pointers are ignored.
template <class T>
bool fits_packs(int64_t columns, std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(Pack<T>) != 0) return false;
  }
  return columns % Pack<T>::kSize == 0;
}

struct AddOp {
  template <class Acc>
  __device__ Acc operator()(Acc a, Acc b) const {
    return a + b;
  }
};
struct MaxOp {
  template <class Acc>
  __device__ Acc operator()(Acc a, Acc b) const {
    return a > b ? a : b;
  }
};

// Combines one value per thread in a fixed order; every thread gets the result. blockDim.x is a
// multiple of 32, at most 1024. `shared` holds 33 elements and may be reused after the next
// __syncthreads().
template <class Acc, class Op>
__device__ Acc reduce_block(Acc value, Op op, Acc* shared) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    Acc total = shared[0];
    for (int w = 1; w < warps; ++w) total = op(total, shared[w]);
    shared[32] = total;
  }
  __syncthreads();
  return shared[32];
}

// Whether the current device is a Hopper GPU.
inline bool is_hopper() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  return major == 9;
}

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

// Allows a kernel that much dynamic shared memory; false: the device has less.
template <class Kernel>
bool allow_shared_memory(Kernel* kernel, size_t bytes) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  if (bytes + attributes.sharedSizeBytes <= size_t{48} * 1024) return true;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  if (bytes + attributes.sharedSizeBytes > static_cast<size_t>(most)) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "cudaFuncSetAttribute");
  return true;
}

// Note [Backwards]
// Matrix products write and read their rows from the first to the last. Norms, activations and amax
// kernels go from the last to the first: the L2 cache still holds the rows that the preceding
// product wrote last, and the following product or cast finds the rows that they wrote last.
__device__ __forceinline__ unsigned reverse_block() { return gridDim.x - 1 - blockIdx.x; }

inline cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

constexpr int kThreads = 256;

// Number of blocks of kThreads for `count` elements, in a grid-stride loop.
inline unsigned blocks_for(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 65536 ? 65536 : blocks);
}

// Threads of a block that works on one row of `columns`.
inline unsigned threads_for_row(int64_t columns) {
  return columns >= 4096 ? 1024u : columns >= 1024 ? 256u : columns >= 256 ? 128u : 32u;
}

}  // namespace megatron
