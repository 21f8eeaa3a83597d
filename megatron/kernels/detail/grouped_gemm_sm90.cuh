// One grouped product: CUTLASS' pointer-array kernel for Hopper, which reads sizes and addresses of
// the groups from device memory.
//
// Note [Tensor maps of groups]
// CUTLASS' kernel rewrites its tensor maps whenever a multiprocessor gets to another group: it
// waits for all stores of the group before, and nothing is loaded meanwhile. With 128 experts
// almost every tile is another group's. Here a small kernel writes the maps of all groups first;
// the two classes below make CUTLASS' kernel choose among them.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/experts/grouped_gemm.h"

namespace megatron {

// What CUTLASS reads of the groups, arrays [experts] on the device. A group is D [m, n] = A B.
struct GroupArrays {
  cute::Shape<int, int, int>* sizes;  // m, n, k
  const cutlass::bfloat16_t** a;
  const cutlass::bfloat16_t** b;
  void** d;
  int64_t* lda;  // elements from row to row
  int64_t* ldb;
  int64_t* ldd;

  static constexpr int64_t kBytes = 3 * sizeof(int) + 6 * sizeof(int64_t);  // per group
};

constexpr int kMapsOfInputs = 2;   // A, B
constexpr int kMapsOfOutputs = 3;  // D of each warp group, of which the second is not used, and C

// Loads with the maps of the current group.
template <class Base>
struct MappedMainloop : Base {
  template <class Problem>
  static size_t get_workspace_size(const Problem& problem, const typename Base::Arguments&, int) {
    return sizeof(cute::TmaDescriptor) * kMapsOfInputs * problem.groups();
  }

  CUTLASS_DEVICE auto tensormaps_init(const typename Base::Params& params,
                                      typename Base::TensorMapStorage&, int32_t, int32_t) {
    const auto* maps = static_cast<const cute::TmaDescriptor*>(params.tensormaps);
    return cute::make_tuple(maps, maps + 1);
  }

  template <class Maps, class Shape>
  CUTLASS_DEVICE void tensormaps_perform_update(typename Base::TensorMapStorage&,
                                                const typename Base::Params&, const Maps&, Shape,
                                                int32_t next_group) {
    group_ = next_group;
  }

  template <class Maps>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(typename Base::TensorMapStorage&, const Maps&) {}

  template <class Maps>
  CUTLASS_DEVICE void tensormaps_fence_acquire(const Maps& maps) {
    Base::tensormaps_fence_acquire(of_group(maps));
  }

  template <class Pipeline, class State, class Inputs, class Maps, class... Rest>
  CUTLASS_DEVICE void load(const typename Base::Params& params, Pipeline pipeline, State state,
                           const Inputs& inputs, const Maps& maps, Rest&&... rest) {
    Base::load(params, pipeline, state, inputs, of_group(maps), rest...);
  }

 private:
  template <class Maps>
  CUTLASS_DEVICE auto of_group(const Maps& maps) const {
    return cute::make_tuple(cute::get<0>(maps) + kMapsOfInputs * group_,
                            cute::get<1>(maps) + kMapsOfInputs * group_);
  }

  int32_t group_ = 0;
};

// Loads C and stores D with the maps of the current group.
template <class Base>
struct MappedEpilogue : Base {
  using Base::Base;
  using Maps = const cute::TmaDescriptor*;
  using Storage = typename Base::TensorStorage;

  template <class Problem>
  static size_t get_workspace_size(const Problem& problem, const typename Base::Arguments&, int) {
    return sizeof(cute::TmaDescriptor) * kMapsOfOutputs * problem.groups();
  }

  CUTLASS_DEVICE auto load_init(const typename Base::Params& params,
                                typename Base::TensorMapStorage&, int32_t, int32_t) {
    return cute::make_tuple(Maps(params.tensormaps + kMapsOfOutputs - 1));
  }

  CUTLASS_DEVICE auto store_init(const typename Base::Params& params,
                                 typename Base::TensorMapStorage&, int32_t, int32_t, int32_t) {
    return cute::make_tuple(Maps(params.tensormaps));
  }

  template <bool kIsLoad, class Shape>
  CUTLASS_DEVICE void tensormaps_perform_update(typename Base::TensorMapStorage&,
                                                const typename Base::Params&, Maps, Shape,
                                                int32_t next_group, int32_t) {
    group_ = next_group;
  }

  template <bool kIsLoad>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(typename Base::TensorMapStorage&, Maps, int32_t) {
  }

  template <bool kIsLoad>
  CUTLASS_DEVICE void tensormaps_fence_acquire(Maps maps) {
    Base::template tensormaps_fence_acquire<kIsLoad>(of_group(maps));
  }

  template <class Pipeline, class State, class Shape, class Tile, class Coord, class Mma>
  CUTLASS_DEVICE auto load(Pipeline pipeline, State state, Shape shape, Tile tile, Coord coord,
                           Mma mma, int thread, Storage& storage, Maps maps, int subtile) {
    return Base::load(pipeline, state, shape, tile, coord, mma, thread, storage, of_group(maps),
                      subtile);
  }

  template <class Load, class LoadState, class Store, class StoreState, class Shape, class Tile,
            class Coord, class Sums, class Mma>
  CUTLASS_DEVICE auto store(Load load, LoadState load_state, Store store, StoreState store_state,
                            Shape shape, Tile tile, Coord coord, Sums sums, Mma mma, int thread,
                            Storage& storage, Maps maps, int subtile) {
    return Base::store(load, load_state, store, store_state, shape, tile, coord, sums, mma, thread,
                       storage, of_group(maps), subtile);
  }

 private:
  CUTLASS_DEVICE Maps of_group(Maps maps) const { return maps + kMapsOfOutputs * group_; }

  int32_t group_ = 0;
};

// Writes the maps of group blockIdx.x, by one warp, with CUTLASS' own code.
template <class Grouped>
__global__ void __launch_bounds__(32)
    write_maps(const __grid_constant__ typename Grouped::Kernel::Params params) {
  using Inputs = typename Grouped::PlainMainloop;
  using Outputs = typename Grouped::PlainEpilogue;
  __shared__ alignas(128) typename Inputs::TensorMapStorage inputs;
  __shared__ alignas(128) typename Outputs::TensorMapStorage outputs;
  const int group = static_cast<int>(blockIdx.x);
  const auto shape = cute::append<4>(params.problem_shape.get_problem_shape(group), 1);
  if (cute::get<0>(shape) == 0) return;
  Inputs mainloop;
  const auto maps = mainloop.tensormaps_init(params.mainloop, inputs, 1, kMapsOfInputs * group);
  mainloop.tensormaps_perform_update(inputs, params.mainloop, maps, shape, group);
  __syncwarp();
  mainloop.tensormaps_cp_fence_release(inputs, maps);
  // The epilogue's storage is not touched.
  Outputs epilogue(params.epilogue, reinterpret_cast<typename Outputs::TensorStorage&>(outputs));
  const auto write = [&](auto is_load) {
    constexpr bool kIsLoad = decltype(is_load)::value;
    const auto* map = cute::get<0>(epilogue.template tensormaps_init<kIsLoad>(
        params.epilogue, outputs, 1, kMapsOfOutputs * group, 0));
    epilogue.template tensormaps_perform_update<kIsLoad>(outputs, params.epilogue, map, shape,
                                                         group, 0);
    __syncwarp();
    epilogue.template tensormaps_cp_fence_release<kIsLoad>(outputs, map, 0);
  };
  write(std::false_type());
  if constexpr (Grouped::kIsWeightGrad) write(std::true_type());
}

// Tiles of 128 x 128, in clusters of two that share their rows of A; two warp groups take turns, so
// that one stores its tile while the other multiplies. Of the tiles measured on an H200 this one
// was the fastest, or nearly, for every product and load (docs/performance/grouped_products.md);
// all give the same bits. kWideStores: tiles leave in pieces of 64 x 64 instead of 64 x 32, which
// takes shared memory from the operands but is faster where sums have few terms.
template <GroupedProduct kProduct, bool kWideStores>
struct GroupedKernel {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using Piece = std::conditional_t<kWideStores, cute::Shape<cute::_64, cute::_64>,
                                   cutlass::epilogue::collective::EpilogueTileAuto>;
  static constexpr bool kIsWeightGrad = kProduct == GroupedProduct::kWeightGrad;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using In = cutlass::bfloat16_t;
  using Out = std::conditional_t<kIsWeightGrad, float, In>;
  using Old = std::conditional_t<kIsWeightGrad, float, void>;
  using LayoutA = std::conditional_t<kIsWeightGrad, ColumnMajor, RowMajor>;
  using LayoutB = std::conditional_t<kProduct == GroupedProduct::kForward, ColumnMajor, RowMajor>;
  static constexpr int kAlignment = 8, kOutAlignment = 16 / sizeof(Out);

  using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, Piece, float, float, Old,
      RowMajor*, kOutAlignment, Out, RowMajor*, kOutAlignment,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong,
      cutlass::epilogue::fusion::LinearCombination<Out, float, Old>>::CollectiveOp;
  using PlainMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, LayoutA*, kAlignment, In, LayoutB*,
      kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename PlainEpilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<
      cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>, MappedMainloop<PlainMainloop>,
      MappedEpilogue<PlainEpilogue>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  // One number each: the distance of rows.
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8);

  static typename Gemm::Arguments arguments(int64_t groups, const GroupArrays& arrays, float beta) {
    const auto* stride_d = reinterpret_cast<StrideD*>(arrays.ldd);
    typename Gemm::Arguments all;
    all.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    all.problem_shape = {static_cast<int>(groups), arrays.sizes, nullptr};
    all.mainloop.ptr_A = arrays.a;
    all.mainloop.dA = reinterpret_cast<StrideA*>(arrays.lda);
    all.mainloop.ptr_B = arrays.b;
    all.mainloop.dB = reinterpret_cast<StrideB*>(arrays.ldb);
    all.epilogue.thread.alpha = 1.0f;
    all.epilogue.thread.beta = beta;
    if constexpr (kIsWeightGrad)
      all.epilogue.ptr_C = const_cast<const float**>(reinterpret_cast<float**>(arrays.d));
    all.epilogue.dC = const_cast<StrideD*>(stride_d);
    all.epilogue.ptr_D = reinterpret_cast<Out**>(arrays.d);
    all.epilogue.dD = const_cast<StrideD*>(stride_d);
    all.hw_info.device_id = 0;
    check_cuda(cudaGetDevice(&all.hw_info.device_id), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&all.hw_info.sm_count, cudaDevAttrMultiProcessorCount,
                                      all.hw_info.device_id),
               "cudaDeviceGetAttribute");
    return all;
  }

  static void check(cutlass::Status status, const char* step) {
    MEGATRON_CHECK(status == cutlass::Status::kSuccess, "a grouped product failed to ", step, ": ",
                   cutlassGetStatusString(status), ", ", cudaGetErrorString(cudaGetLastError()),
                   "\nhint: CUDA_LAUNCH_BLOCKING=1 shows the call that failed first");
  }

  static void run(int64_t groups, const GroupArrays& arrays, float beta, void* workspace,
                  int64_t workspace_bytes, cudaStream_t stream) {
    const typename Gemm::Arguments all = arguments(groups, arrays, beta);
    MEGATRON_ASSERT(static_cast<int64_t>(Gemm::get_workspace_size(all)) <= workspace_bytes,
                    "a grouped product needs ", Gemm::get_workspace_size(all),
                    " bytes of workspace, there are ", workspace_bytes);
    Gemm gemm;
    check(gemm.initialize(all, workspace, stream), "start");
    write_maps<GroupedKernel><<<static_cast<unsigned>(groups), 32, 0, stream>>>(gemm.params());
    check_cuda(cudaGetLastError(), "tensor maps of a grouped product");
    check(gemm.run(stream), "run");
  }
};

}  // namespace megatron
