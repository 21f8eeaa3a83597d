// Note [Writes of the gated delta rule]
// A block has one chunk of one head. With A_ij = beta_i (k_i . k_j) exp(c_i - c_j) for j < i in one
// document and T = (I + A)^-1:
//
//   W = T diag(beta exp(c)) K,  U = T diag(beta) V
//
// T is computed in fp32 in place of A: each warp inverts a diagonal block of 16 by substitution;
// then blocks of 16, and of 32, are joined, T21 = -T22 (A21 T11), by tensor cores in tf32, each
// operand as a sum of two. The place above the diagonal holds the products A21 T11.
#include "megatron/kernels/detail/delta_chunk.cuh"
#include "megatron/kernels/detail/sm90.cuh"

namespace megatron::delta {
namespace {

using namespace sm90;

struct WritesParams {
  CUtensorMap k, v, w, u, t;
  ssd::StepSource steps;
  const float* beta;
  int value_heads, per_key, chunks;
};

constexpr int kRow = kChunk + 4;  // floats of a row of T

template <int kK, int kV, bool kKeep>
struct WritesShape {
  static constexpr int kBlocks = kKeep ? 3 : 4;  // of a multiprocessor
  static constexpr int kPanelsK = kK / kPanelColumns, kPanelsV = kV / kPanelColumns;
  static constexpr int kSharedBytes =
      1024 + (kPanelsK + kPanelsV + kKeep) * kPanel + (kChunk * kRow + 4 * kChunk) * 4 + 16;
};

// a as a sum of two tf32 numbers.
struct Split {
  uint32_t high, low;
  __device__ __forceinline__ explicit Split(float a) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(a));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(a - __uint_as_float(high)));
  }
};
__device__ __forceinline__ void mma_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// d [16, 8 kTiles] += a [16, 16] b [16, 8 kTiles], both in rows of kRow.
template <int kTiles>
__device__ __forceinline__ void multiply(float (&d)[kTiles][4], const float* a, const float* b,
                                         int lane) {
  const int row = lane / 4, of_four = lane % 4;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    const float* const at = a + row * kRow + k + of_four;
    const Split a0(at[0]), a1(at[8 * kRow]), a2(at[4]), a3(at[8 * kRow + 4]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float* const from = b + (k + of_four) * kRow + 8 * n + row;
      const Split b0(from[0]), b1(from[4 * kRow]);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.high, b1.high);
      mma_tf32(d[n], a0.high, a1.high, a2.high, a3.high, b0.low, b1.low);
      mma_tf32(d[n], a0.low, a1.low, a2.low, a3.low, b0.high, b1.high);
    }
  }
}
// to [16, 8 kTiles] = sign d
template <int kTiles>
__device__ __forceinline__ void put(float* to, const float (&d)[kTiles][4], float sign, int lane) {
  float* const at = to + lane / 4 * kRow + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    *reinterpret_cast<float2*>(at + 8 * n) = make_float2(sign * d[n][0], sign * d[n][1]);
    *reinterpret_cast<float2*>(at + 8 * kRow + 8 * n) = make_float2(sign * d[n][2], sign * d[n][3]);
  }
}

// Inverts I + A, A [64, 64] in blocks of 16 on and below the diagonal, in place, by a warpgroup.
// Diagonal block w was written by warp w, the others before the last __syncthreads().
__device__ __forceinline__ void invert(float* T, int warp, int lane) {
  const auto block = [&](int i, int j) { return T + 16 * (i * kRow + j); };
  {
    float* const own = block(warp, warp);
    const int column = lane % 16;
    float t[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float a[16];
#pragma unroll
      for (int j = 0; j < i; j += 4)
        *reinterpret_cast<float4*>(a + j) = *reinterpret_cast<const float4*>(own + i * kRow + j);
      float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= a[j] * t[j];
      t[i] = sum;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) own[i * kRow + column] = t[i];
    }
  }
  __syncthreads();
  {
    const int first = warp / 2 * 2, second = first + 1, columns = warp % 2 * 8;
    float* const product = block(first, second) + columns;
    float d[1][4] = {};
    multiply(d, block(second, first), block(first, first) + columns, lane);
    put(product, d, 1.0f, lane);
    __syncwarp();
    float e[1][4] = {};
    multiply(e, block(second, second), product, lane);
    __syncthreads();
    put(block(second, first) + columns, e, -1.0f, lane);
  }
  __syncthreads();
  {
    const int row = warp / 2, column = warp % 2;
    float d[2][4] = {};
    for (int k = column; k < 2; ++k) multiply(d, block(2 + row, k), block(k, column), lane);
    put(block(row, 2 + column), d, 1.0f, lane);
    __syncthreads();
    float e[2][4] = {};
    for (int k = 0; k <= row; ++k) multiply(e, block(2 + row, 2 + k), block(k, 2 + column), lane);
    put(block(2 + row, column), e, -1.0f, lane);
  }
  __syncthreads();
}

// Rows of a product [64, 64 kPanels] to panels in shared memory, as bf16.
template <int kSums>
__device__ __forceinline__ void put_panels(uint32_t to, const float (&d)[kSums], int warp,
                                           int lane) {
  ssd::write_state_panels<2 * kSums>(to, d, 16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 8);
}

template <int kK, int kV, bool kKeep>
__global__ void __launch_bounds__(kGroupThreads, WritesShape<kK, kV, kKeep>::kBlocks)
    delta_writes(const __grid_constant__ WritesParams p) {
  using Shape = WritesShape<kK, kV, kKeep>;
  extern __shared__ unsigned char raw[];
  unsigned char* const shared = ssd::aligned_shared(raw);
  const uint32_t k_tile = shared_address(shared), v_tile = k_tile + Shape::kPanelsK * kPanel;
  const uint32_t t_tile = v_tile + Shape::kPanelsV * kPanel;  // of what is kept
  float* const T =
      reinterpret_cast<float*>(shared + (Shape::kPanelsK + Shape::kPanelsV + kKeep) * kPanel);
  float* const sums = T + kChunk * kRow;
  float* const keeps = sums + kChunk;
  float* const betas = keeps + kChunk;
  int* const starts = reinterpret_cast<int*>(betas + kChunk);
  const uint32_t full = shared_address(starts + kChunk);

  const int chunk = blockIdx.x, head = blockIdx.y, sample = blockIdx.z;
  const int key_head = head / p.per_key, token0 = chunk * kChunk;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init_fence();
    barrier_expect(full, (Shape::kPanelsK + Shape::kPanelsV) * kPanel);
    for (int i = 0; i < Shape::kPanelsK; ++i)
      load_panel(k_tile + i * kPanel, &p.k, full, key_head * kK + i * kPanelColumns, sample,
                 token0);
    for (int i = 0; i < Shape::kPanelsV; ++i)
      load_panel(v_tile + i * kPanel, &p.v, full, head * kV + i * kPanelColumns, sample, token0);
  }
  if (warp == 0) {
    const ssd::HeadSteps steps(p.steps, head, sample);
    const ssd::LaneDecays mine(steps.fetch(chunk, lane), steps.a, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[2 * lane + i] = mine.sum[i];
      keeps[2 * lane + i] = mine.keep(i);
      starts[2 * lane + i] = mine.start[i];
    }
  } else if (warp == 1) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = token0 + 2 * lane + i;
      betas[2 * lane + i] =
          token < p.steps.tokens
              ? p.beta[(static_cast<int64_t>(token) * p.steps.samples + sample) * p.value_heads +
                       head]
              : 0.0f;
    }
  }
  __syncthreads();
  barrier_wait(full, 0);

  const int row = 16 * warp + lane / 4, pair = 2 * (lane % 4);
  {
    float scores[32];
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      const uint64_t at = k_major(k_tile + k / 4 * kPanel + k % 4 * 32);
      wgmma<0, 0>(scores, at, at, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(scores);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k > warp) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = 16 * k + 8 * half + pair;
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          const int i = row + 8 * low;
          const float* const s = scores + (2 * k + half) * 4 + 2 * low;
          const float sum = sums[i], beta = betas[i];
          const int start = starts[i];
          float a[2];
#pragma unroll
          for (int next = 0; next < 2; ++next)
            a[next] = j + next < i && j + next >= start
                          ? s[next] * beta * exp2_fast(fminf(sum - sums[j + next], 0.0f))
                          : 0.0f;
          *reinterpret_cast<float2*>(T + i * kRow + j) = make_float2(a[0], a[1]);
        }
      }
    }
  }
  __syncwarp();
  invert(T, warp, lane);

  uint32_t of_v[4][4], of_k[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t plain[4] = {};
    if (k > warp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_v[k][i] = of_k[k][i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (k > warp) continue;
      const int j = 16 * k + 8 * (i / 2) + pair;
      const float2 t = *reinterpret_cast<const float2*>(T + (row + 8 * (i % 2)) * kRow + j),
                   beta = *reinterpret_cast<const float2*>(betas + j),
                   keep = *reinterpret_cast<const float2*>(keeps + j);
      const float low = t.x * beta.x, high = t.y * beta.y;
      of_v[k][i] = pack2(low, high);
      of_k[k][i] = pack2(low * keep.x, high * keep.y);
      plain[i] = pack2(t.x, t.y);
    }
    if constexpr (kKeep)
      store_matrices(
          t_tile + panel_piece(16 * warp + lane / 8 % 2 * 8 + lane % 8, 2 * k + lane / 16),
          plain[0], plain[1], plain[2], plain[3]);
  }
  {
    float w[kK / 2];
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<1>(w, of_k[k], mn_major(k_tile + k * 16 * kPanelRowBytes, kPanel), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(w);
    __syncthreads();  // all have read the keys
    put_panels(k_tile, w, warp, lane);
  }
  {
    float u[kV / 2];
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma<1>(u, of_v[k], mn_major(v_tile + k * 16 * kPanelRowBytes, kPanel), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(u);
    __syncthreads();
    put_panels(v_tile, u, warp, lane);
  }
  async_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kPanelsK; ++i)
      store_panel(&p.w, k_tile + i * kPanel, head * kK + i * kPanelColumns, sample, token0);
    for (int i = 0; i < Shape::kPanelsV; ++i)
      store_panel(&p.u, v_tile + i * kPanel, head * kV + i * kPanelColumns, sample, token0);
    if constexpr (kKeep)
      store_panel(&p.t, t_tile, 0, 0, ((sample * p.chunks + chunk) * p.value_heads + head) * 64);
    stores_commit();
    stores_done();
  }
}

template <int kK, int kV, bool kKeep>
void launch_writes(const GatedDeltaArgs& args, void* inverses, cudaStream_t stream) {
  const int64_t chunks = (args.tokens + kChunk - 1) / kChunk;
  const WorkRows work = work_rows(args);
  WritesParams p{};
  p.k = map_of(args, args.k, args.key_heads * kK);
  p.v = map_of(args, args.v, args.value_heads * kV);
  p.w = map_of(args, work.w, args.value_heads * kK);
  p.u = map_of(args, work.u, args.value_heads * kV);
  p.steps = step_source(args);
  p.beta = args.beta;
  p.value_heads = static_cast<int>(args.value_heads);
  p.per_key = static_cast<int>(args.value_heads / args.key_heads);
  p.chunks = static_cast<int>(chunks);
  if constexpr (kKeep) p.t = tile_map(inverses, args.samples * chunks * args.value_heads, kChunk);
  constexpr int kBytes = WritesShape<kK, kV, kKeep>::kSharedBytes;
  auto* const kernel = delta_writes<kK, kV, kKeep>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "cudaFuncSetAttribute");
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(args.value_heads),
                  static_cast<unsigned>(args.samples));
  kernel<<<grid, kGroupThreads, kBytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "the writes of a gated delta rule");
}

}  // namespace

void compute_writes(const GatedDeltaArgs& args, void* inverses, cudaStream_t stream) {
  const bool wide_v = args.value_size == 128, wide_k = args.key_size == 128;
  if (inverses)  // of the backward, whose sizes are equal
    wide_k ? launch_writes<128, 128, true>(args, inverses, stream)
           : launch_writes<64, 64, true>(args, inverses, stream);
  else if (wide_k)
    wide_v ? launch_writes<128, 128, false>(args, nullptr, stream)
           : launch_writes<128, 64, false>(args, nullptr, stream);
  else
    wide_v ? launch_writes<64, 128, false>(args, nullptr, stream)
           : launch_writes<64, 64, false>(args, nullptr, stream);
}

}  // namespace megatron::delta
