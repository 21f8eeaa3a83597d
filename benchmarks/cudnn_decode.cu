// Attention of decoding steps over a paged cache, next to cuDNN's (paged_decode.cuh).
//
//   cmake --build build/gpu --target cudnn_decode
//
// Prints, for each number of sequences and length, GB/s of keys and values: ours, that of
// batch-invariant mode, cuDNN's; and the largest difference of the numbers.
#include <dlfcn.h>

#include <cstring>  // which the frontend needs

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include "benchmarks/paged_decode.cuh"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace {

namespace fe = cudnn_frontend;
using namespace paged_decode;

void check_plan(fe::error_t error) {
  if (error.is_good()) return;
  std::fprintf(stderr, "cuDNN: %s\n", error.get_message().c_str());
  std::exit(1);
}

cudnnHandle_t handle() {
  static const cudnnHandle_t made = [] {
    cudnnHandle_t h = nullptr;
    if (fe::detail::create_handle(&h) != CUDNN_STATUS_SUCCESS) std::exit(1);
    return h;
  }();
  return made;
}

double cudnn_seconds(Case& c, Half* out) {
  enum : int64_t { kQ, kK, kV, kOut, kKeyTable, kValueTable, kQueries, kLengths };
  fe::graph::Graph graph;
  graph.set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  using Sizes = std::vector<int64_t>;
  const auto tensor = [&](int64_t id, const Sizes& sizes, const Sizes& strides,
                          fe::DataType_t type = fe::DataType_t::BFLOAT16) {
    return graph.tensor(
        fe::graph::Tensor_attributes().set_uid(id).set_dim(sizes).set_stride(strides).set_data_type(
            type));
  };
  const int64_t b = c.rows, blocks = c.blocks_of_row();
  const Sizes pool = {b * blocks, kGroups, kBlock, kSize},
              pool_strides = {kBlock * kGroups * kSize, kSize, kGroups * kSize, 1},
              row = {b, kHeads, 1, kSize}, row_strides = {kHeads * kSize, kSize, kHeads * kSize, 1};
  const auto table = [&](int64_t id) {
    return tensor(id, {b, 1, blocks, 1}, {blocks, blocks, 1, 1}, fe::DataType_t::INT32);
  };
  const auto counts = [&](int64_t id) {
    return tensor(id, {b, 1, 1, 1}, {1, 1, 1, 1}, fe::DataType_t::INT32);
  };
  const auto result = graph.sdpa(tensor(kQ, row, row_strides), tensor(kK, pool, pool_strides),
                                 tensor(kV, pool, pool_strides),
                                 fe::graph::SDPA_attributes()
                                     .set_generate_stats(false)
                                     .set_attn_scale(static_cast<float>(kScale))
                                     .set_padding_mask(true)
                                     .set_seq_len_q(counts(kQueries))
                                     .set_seq_len_kv(counts(kLengths))
                                     .set_paged_attention_k_table(table(kKeyTable))
                                     .set_paged_attention_v_table(table(kValueTable))
                                     .set_paged_attention_max_seq_len_kv(c.length));
  result[0]->set_output(true).set_uid(kOut).set_dim(row).set_stride(row_strides);
  check_plan(graph.validate());
  check_plan(graph.build_operation_graph(handle()));
  check_plan(graph.create_execution_plans({fe::HeurMode_t::A}));
  check_plan(graph.check_support(handle()));
  check_plan(graph.build_plans(handle(), fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
  int64_t workspace = 0;
  check_plan(graph.get_workspace_size(workspace));
  std::unordered_map<int64_t, void*> pointers = {
      {kQ, c.query},
      {kK, c.keys},
      {kV, c.values},
      {kOut, out},
      {kKeyTable, c.table},
      {kValueTable, c.table},
      {kLengths, c.lengths_d},
      {kQueries, c.memory.copy(std::vector<int32_t>(static_cast<size_t>(b), 1))}};
  char* space = c.memory.make<char>(static_cast<size_t>(workspace) + 1);
  return seconds([&] { check_plan(graph.execute(handle(), pointers, space)); });
}

}  // namespace

int main() {
  fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  if (fe::cudnn_dlhandle == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  paged_decode::next_to_ours("cuDNN", cudnn_seconds);
}
