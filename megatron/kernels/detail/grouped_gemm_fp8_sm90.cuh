// One grouped product of FP8 operands: CUTLASS' pointer-array kernels for Hopper. See
// grouped_gemm_sm90.cuh, whose tensor maps it uses.
#pragma once

#include <cutlass/detail/blockwise_scale_layout.hpp>

#include "megatron/kernels/detail/grouped_gemm_sm90.cuh"
#include "megatron/kernels/experts/grouped_gemm_fp8.h"

namespace megatron {

// What CUTLASS reads of the groups, arrays [experts] on the device. A group is D [m, n] = A B.
struct Fp8GroupArrays {
  const uint8_t** a;
  const uint8_t** b;
  void** d;
  int64_t* lda;  // elements from row to row
  int64_t* ldb;
  int64_t* ldd;
  const float** a_scale;  // of blocks
  const float** b_scale;
  cute::Shape<int, int, int>* sizes;  // m, n, k
  float* alpha;                       // without blocks: the factor of a group

  static constexpr int64_t kBytes = 8 * sizeof(int64_t) + 3 * sizeof(int) + sizeof(float);
};

enum class Fp8Scaling : uint8_t { kTensorFast, kTensor, kBlocks };

// Runs the product of all groups; `maps`: workspace of map_bytes.
struct Fp8GroupedRun {
  int64_t groups;
  Fp8GroupArrays arrays;
  float beta;
  void* maps;
  int64_t map_bytes;
  cudaStream_t stream;
};

// Tiles of 128 x 128. Sums that leave the tensor cores for fp32 every 128 terms need registers for
// two tiles: there two warp groups share one tile instead of taking turns.
template <Fp8Type kA, Fp8Scaling kScaling, bool kWeightGrad>
struct GroupedFp8Kernel {
  static constexpr bool kIsWeightGrad = kWeightGrad, kBlocks = kScaling == Fp8Scaling::kBlocks,
                        kFast = kScaling == Fp8Scaling::kTensorFast;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using A = std::conditional_t<kA == Fp8Type::kE4M3, cutlass::float_e4m3_t, cutlass::float_e5m2_t>;
  using B = cutlass::float_e4m3_t;
  using Out = std::conditional_t<kWeightGrad, float, cutlass::bfloat16_t>;
  using Old = std::conditional_t<kWeightGrad, float, void>;
  static constexpr int kAlignment = 16, kOutAlignment = 16 / sizeof(Out);
  // Along the summed dimension, of a weight's blocks along the other one too. Scales of A lie by
  // rows, those of a weight by the summed dimension first.
  using Scales = cutlass::detail::Sm90BlockwiseScaleConfig<
      1, kWeightGrad ? 1 : 128, 128, cute::GMMA::Major::MN,
      kWeightGrad ? cute::GMMA::Major::MN : cute::GMMA::Major::K>;
  using ScalesA = decltype(Scales::deduce_layoutSFA());
  using ScalesB = decltype(Scales::deduce_layoutSFB());
  using LayoutA = std::conditional_t<kBlocks, cute::tuple<RowMajor*, ScalesA*>, RowMajor*>;
  using LayoutB = std::conditional_t<kBlocks, cute::tuple<ColumnMajor*, ScalesB*>, ColumnMajor*>;
  using Schedule = std::conditional_t<
      kBlocks, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise,
      std::conditional_t<kFast, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8FastAccum,
                         cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>>;
  using OutSchedule =
      std::conditional_t<kFast, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong,
                         cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>;

  using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Old, RowMajor*, kOutAlignment,
      Out, RowMajor*, kOutAlignment, OutSchedule,
      cutlass::epilogue::fusion::LinearCombination<Out, float, Old>>::CollectiveOp;
  using PlainMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, LayoutA, kAlignment, B, LayoutB,
      kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename PlainEpilogue::SharedStorage))>,
      Schedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<
      cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>, MappedMainloop<PlainMainloop>,
      MappedEpilogue<PlainEpilogue>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename PlainMainloop::InternalStrideA;
  using StrideB = typename PlainMainloop::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  // One number each: the distance of rows.
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8);

  static typename Gemm::Arguments arguments(const Fp8GroupedRun& run) {
    const Fp8GroupArrays& arrays = run.arrays;
    auto* stride_d = reinterpret_cast<StrideD*>(arrays.ldd);
    typename Gemm::Arguments all;
    all.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    all.problem_shape = {static_cast<int>(run.groups), arrays.sizes, nullptr};
    all.mainloop.ptr_A = reinterpret_cast<const A**>(arrays.a);
    all.mainloop.dA = reinterpret_cast<StrideA*>(arrays.lda);
    all.mainloop.ptr_B = reinterpret_cast<const B**>(arrays.b);
    all.mainloop.dB = reinterpret_cast<StrideB*>(arrays.ldb);
    if constexpr (kBlocks) {
      all.mainloop.ptr_SFA = arrays.a_scale;
      all.mainloop.ptr_SFB = arrays.b_scale;
      // Layouts follow from the sizes of a group.
      all.mainloop.layout_SFA = nullptr;
      all.mainloop.layout_SFB = nullptr;
      all.epilogue.thread.alpha = 1.0f;
    } else {
      all.epilogue.thread.alpha_ptr = arrays.alpha;
      all.epilogue.thread.dAlpha = {cute::_0{}, cute::_0{}, 1};
    }
    all.epilogue.thread.beta = run.beta;
    if constexpr (kWeightGrad)
      all.epilogue.ptr_C = const_cast<const float**>(reinterpret_cast<float**>(arrays.d));
    all.epilogue.dC = stride_d;
    all.epilogue.ptr_D = reinterpret_cast<Out**>(arrays.d);
    all.epilogue.dD = stride_d;
    all.hw_info.device_id = 0;
    check_cuda(cudaGetDevice(&all.hw_info.device_id), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&all.hw_info.sm_count, cudaDevAttrMultiProcessorCount,
                                      all.hw_info.device_id),
               "cudaDeviceGetAttribute");
    return all;
  }

  static void check(cutlass::Status status, const char* step) {
    MEGATRON_CHECK(status == cutlass::Status::kSuccess, "a grouped FP8 product failed to ", step,
                   ": ", cutlassGetStatusString(status), ", ",
                   cudaGetErrorString(cudaGetLastError()),
                   "\nhint: CUDA_LAUNCH_BLOCKING=1 shows the call that failed first");
  }

  static void run(const Fp8GroupedRun& run) {
    const typename Gemm::Arguments all = arguments(run);
    MEGATRON_ASSERT(static_cast<int64_t>(Gemm::get_workspace_size(all)) <= run.map_bytes,
                    "a grouped FP8 product needs ", Gemm::get_workspace_size(all),
                    " bytes of workspace, there are ", run.map_bytes);
    Gemm gemm;
    check(gemm.initialize(all, run.maps, run.stream), "start");
    write_maps<GroupedFp8Kernel>
        <<<static_cast<unsigned>(run.groups), 32, 0, run.stream>>>(gemm.params());
    check_cuda(cudaGetLastError(), "tensor maps of a grouped FP8 product");
    check(gemm.run(run.stream), "run");
  }
};

// In sources of their own, which are compiled side by side.
void run_grouped_fp8_by_experts(const GroupedGemmFp8& gemm, const Fp8GroupedRun& run);
void run_grouped_fp8_by_blocks(const GroupedGemmFp8& gemm, const Fp8GroupedRun& run);

// run(kernel) for the type of A.
template <Fp8Scaling kScaling, bool kWeightGrad>
void run_grouped_fp8(const GroupedGemmFp8& gemm, const Fp8GroupedRun& run) {
  if (gemm.a_type == Fp8Type::kE4M3)
    return GroupedFp8Kernel<Fp8Type::kE4M3, kScaling, kWeightGrad>::run(run);
  GroupedFp8Kernel<Fp8Type::kE5M2, kScaling, kWeightGrad>::run(run);
}

}  // namespace megatron
