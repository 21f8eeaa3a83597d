#include "megatron/tensor/detail/attention_cudnn.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cudnn/Handle.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

// Note [cuDNN without linking]
// The frontend is header-only and calls the library that libtorch has loaded, looked up at run
// time: building needs only cuDNN's headers, and the program uses the library of its machine.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <cudnn_frontend.h>
#pragma GCC diagnostic pop

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace megatron {
namespace {

namespace fe = cudnn_frontend;

enum Id : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };

struct Plan {
  fe::graph::Graph graph;
  int64_t workspace = 0;
  std::string failure;  // why the library supports no plan, or ""
};

using PlanKey = std::vector<int64_t>;

// Empty if the library is loaded, else why not.
const std::string& load_library() {
  static const std::string failure = [] {
    setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "libcudart.so.13",
           /*overwrite=*/0);  // else it warns of further copies it finds
    fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
    return std::string(fe::cudnn_dlhandle == nullptr ? dlerror() : "");
  }();
  return failure;
}

fe::DataType_t data_type(const at::Tensor& t) {
  return t.scalar_type() == at::kBFloat16 ? fe::DataType_t::BFLOAT16
         : t.scalar_type() == at::kHalf   ? fe::DataType_t::HALF
                                          : fe::DataType_t::FLOAT;
}

using Node = std::shared_ptr<fe::graph::Tensor_attributes>;

void describe(const Node& node, Id id, const at::Tensor& t) {
  node->set_uid(id)
      .set_dim(t.sizes().vec())
      .set_stride(t.strides().vec())
      .set_data_type(data_type(t));
}

Node input(fe::graph::Graph& graph, Id id, const at::Tensor& t) {
  fe::graph::Tensor_attributes attributes;
  attributes.set_uid(id)
      .set_dim(t.sizes().vec())
      .set_stride(t.strides().vec())
      .set_data_type(data_type(t));
  return graph.tensor(attributes);
}

// Causal mask and window, for the attributes of forward and backward.
template <class Attributes>
void set_mask(Attributes& attributes, const at::Tensor& q, const at::Tensor& k,
              const AttentionOptions& o) {
  const int64_t last = k.size(2) - 1;
  attributes.set_attn_scale(static_cast<float>(o.scale))
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT);
  if (o.causal && q.size(2) > 1) {  // one query sees every key
    attributes.set_diagonal_band_right_bound(0);
  } else if (!o.causal && o.window_right >= 0 && o.window_right < last) {
    attributes.set_diagonal_band_right_bound(static_cast<int>(o.window_right));
  }
  if (o.window_left >= 0 && o.window_left < last) {  // the frontend's count includes the diagonal
    attributes.set_diagonal_band_left_bound(static_cast<int>(o.window_left + 1));
  }
}

PlanKey make_key(bool backward, const AttentionOptions& o,
                 std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  PlanKey key = {backward,
                 first.get_device(),
                 static_cast<int64_t>(first.scalar_type()),
                 o.causal,
                 o.window_left,
                 o.window_right,
                 std::bit_cast<int64_t>(o.scale),
                 o.deterministic};
  for (const at::Tensor& t : tensors) {
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
  }
  return key;
}

// The plan of a key; `describe_graph` fills in the graph the first time.
template <class F>
Plan& find_plan(const PlanKey& key, F&& describe_graph) {
  thread_local std::map<PlanKey, std::unique_ptr<Plan>> plans;
  std::unique_ptr<Plan>& plan = plans[key];
  if (plan) return *plan;
  plan = std::make_unique<Plan>();
  plan->failure = load_library();
  if (!plan->failure.empty()) return *plan;
  plan->graph.set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  describe_graph(plan->graph);
  const auto handle = at::native::getCudnnHandle();
  fe::error_t status = plan->graph.build(handle, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK});
  if (status.is_good()) status = plan->graph.get_workspace_size(plan->workspace);
  if (status.is_bad()) plan->failure = cat("cuDNN has no plan for it (", status.get_message(), ")");
  return *plan;
}

at::Tensor like_lse(const at::Tensor& q) {
  return at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
}

Plan& forward_plan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& o) {
  return find_plan(make_key(false, o, {q, k, v, out}), [&](fe::graph::Graph& graph) {
    fe::graph::SDPA_attributes attributes;
    attributes.set_name("attention").set_generate_stats(true);
    set_mask(attributes, q, k, o);
    auto [out_node, lse_node] =
        graph.sdpa(input(graph, kQ, q), input(graph, kK, k), input(graph, kV, v), attributes);
    describe(out_node, kOut, out);
    describe(lse_node, kLse, lse);
    out_node->set_output(true);
    lse_node->set_output(true);
  });
}

Plan& backward_plan(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                    const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                    const AttentionOptions& o) {
  return find_plan(
      make_key(true, o, {q, k, v, out, dout, dq, dk, dv}), [&](fe::graph::Graph& graph) {
        fe::graph::SDPA_backward_attributes attributes;
        attributes.set_name("attention backward").set_deterministic_algorithm(o.deterministic);
        set_mask(attributes, q, k, o);
        auto [dq_node, dk_node, dv_node] = graph.sdpa_backward(
            input(graph, kQ, q), input(graph, kK, k), input(graph, kV, v), input(graph, kOut, out),
            input(graph, kDOut, dout), input(graph, kLse, lse), attributes);
        describe(dq_node, kDQ, dq);
        describe(dk_node, kDK, dk);
        describe(dv_node, kDV, dv);
        for (const Node& node : {dq_node, dk_node, dv_node}) node->set_output(true);
      });
}

void execute(Plan& plan, std::initializer_list<std::pair<Id, at::Tensor>> tensors) {
  MEGATRON_CHECK(plan.failure.empty(), "attention through cuDNN: ", plan.failure,
                 "\nhint: --attention-backend flash; CUDNN_LOGLEVEL_DBG=2 makes cuDNN print why");
  std::unordered_map<int64_t, void*> pointers;
  for (const auto& [id, t] : tensors) pointers[id] = t.data_ptr();
  const at::Tensor workspace =
      at::empty({plan.workspace}, tensors.begin()->second.options().dtype(at::kByte));
  fe::error_t status =
      plan.graph.execute(at::native::getCudnnHandle(), pointers, workspace.data_ptr());
  MEGATRON_CHECK(status.is_good(), "attention through cuDNN failed: ", status.get_message(),
                 "\nhint: --attention-backend flash; CUDNN_LOGLEVEL_DBG=2 makes cuDNN print why");
}

}  // namespace

std::string why_not_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options) {
  const at::Tensor lse = like_lse(q);
  const at::Tensor out = v.size(3) == q.size(3)
                             ? at::empty_like(q)
                             : at::empty({q.size(2), q.size(0), q.size(1), v.size(3)}, q.options())
                                   .permute({1, 2, 0, 3});
  const Plan& forward = forward_plan(q, k, v, out, lse, options);
  if (!forward.failure.empty()) return forward.failure;
  return backward_plan(out, q, k, v, out, lse, q, k, v, options).failure;
}

at::Tensor cudnn_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& out, const AttentionOptions& options) {
  const at::Tensor lse = like_lse(q);
  execute(forward_plan(q, k, v, out, lse, options),
          {{kQ, q}, {kK, k}, {kV, v}, {kOut, out}, {kLse, lse}});
  return lse;
}

void cudnn_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                              const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                              const AttentionOptions& options) {
  const AttentionParts parts =
      attention_parts(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), options.deterministic);
  for (int64_t first = 0; first < q.size(0); first += parts.samples) {
    const auto rows = [&](const at::Tensor& t) {
      return t.narrow(0, first, std::min(parts.samples, q.size(0) - first));
    };
    const at::Tensor keys = rows(k), values = rows(v);
    at::Tensor dkeys = rows(dk), dvalues = rows(dv);
    for (int64_t head = 0; head < q.size(1); head += parts.heads) {
      const auto some = [&](const at::Tensor& t) {
        return rows(t).narrow(1, head, std::min(parts.heads, q.size(1) - head));
      };
      if (head == parts.heads) {  // later parts are added to it
        dkeys = at::empty_like(dkeys);
        dvalues = at::empty_like(dvalues);
      }
      const at::Tensor grad = some(dout), queries = some(q), result = some(out),
                       dqueries = some(dq), part = some(lse);
      // cuDNN requires the strides of a separate tensor.
      const at::Tensor sums = part.reshape({-1}).view(part.sizes());
      execute(backward_plan(grad, queries, keys, values, result, sums, dqueries, dkeys, dvalues,
                            options),
              {{kDOut, grad},
               {kQ, queries},
               {kK, keys},
               {kV, values},
               {kOut, result},
               {kLse, sums},
               {kDQ, dqueries},
               {kDK, dkeys},
               {kDV, dvalues}});
      if (head == 0) continue;
      rows(dk).add_(dkeys);
      rows(dv).add_(dvalues);
    }
  }
}

}  // namespace megatron
