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

enum Id : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV, kCounts, kKeyCounts };
// The offsets of a tensor over ranges of rows have its id and this.
constexpr int64_t kOffsetsOf = 32;

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
void set_mask(Attributes& attributes, int64_t num_queries, int64_t num_keys,
              const AttentionOptions& o) {
  const int64_t last = num_keys - 1;
  attributes.set_attn_scale(static_cast<float>(o.scale))
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT);
  if (o.causal && num_queries > 1) {  // one query sees every key
    attributes.set_diagonal_band_right_bound(0);
  } else if (!o.causal && o.window_right >= 0 && o.window_right < last) {
    attributes.set_diagonal_band_right_bound(static_cast<int>(o.window_right));
  }
  if (o.window_left >= 0 && o.window_left < last) {  // the frontend's count includes the diagonal
    attributes.set_diagonal_band_left_bound(static_cast<int>(o.window_left + 1));
  }
}

PlanKey make_key(int64_t kind, const AttentionOptions& o,
                 std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  PlanKey key = {kind,
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

constexpr int64_t kForward = 0, kBackward = 1, kRangesForward = 2, kRangesBackward = 3;

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
  return find_plan(make_key(kForward, o, {q, k, v, out}), [&](fe::graph::Graph& graph) {
    fe::graph::SDPA_attributes attributes;
    attributes.set_name("attention").set_generate_stats(true);
    set_mask(attributes, q.size(2), k.size(2), o);
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
      make_key(kBackward, o, {q, k, v, out, dout, dq, dk, dv}), [&](fe::graph::Graph& graph) {
        fe::graph::SDPA_backward_attributes attributes;
        attributes.set_name("attention backward").set_deterministic_algorithm(o.deterministic);
        set_mask(attributes, q.size(2), k.size(2), o);
        auto [dq_node, dk_node, dv_node] = graph.sdpa_backward(
            input(graph, kQ, q), input(graph, kK, k), input(graph, kV, v), input(graph, kOut, out),
            input(graph, kDOut, dout), input(graph, kLse, lse), attributes);
        describe(dq_node, kDQ, dq);
        describe(dk_node, kDK, dk);
        describe(dv_node, kDV, dv);
        for (const Node& node : {dq_node, dk_node, dv_node}) node->set_output(true);
      });
}

using Bindings = std::vector<std::pair<int64_t, at::Tensor>>;

void execute(Plan& plan, const Bindings& tensors) {
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

// -- ranges of rows

namespace {

// A tensor [rows, n, d] whose ranges of rows are the samples of [b, n, most, d].
struct Ranged {
  Id id;
  at::Tensor rows;
  const RowRanges& ranges;
};

void describe(const Node& node, fe::graph::Graph& graph, const Ranged& t) {
  const int64_t b = t.ranges.counts.size(0), row = t.rows.stride(0) * t.ranges.step;
  const Node offsets = graph.tensor(fe::graph::Tensor_attributes()
                                        .set_uid(t.id + kOffsetsOf)
                                        .set_dim({b + 1, 1, 1, 1})
                                        .set_stride({1, 1, 1, 1})
                                        .set_data_type(fe::DataType_t::INT32));
  node->set_uid(t.id)
      .set_dim({b, t.rows.size(1), t.ranges.most, t.rows.size(2)})
      .set_stride({t.ranges.most * row, t.rows.stride(1), row, 1})
      .set_data_type(data_type(t.rows))
      .set_ragged_offset(offsets);
}

Node input(fe::graph::Graph& graph, const Ranged& t) {
  const Node node = graph.tensor(fe::graph::Tensor_attributes());
  describe(node, graph, t);
  return node;
}

Node counts(fe::graph::Graph& graph, Id id, int64_t b) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_uid(id)
                          .set_dim({b, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(fe::DataType_t::INT32));
}

// Samples, heads, lengths and strides, but not the number of rows.
PlanKey make_ranges_key(int64_t kind, const AttentionOptions& o, const RowRanges& queries,
                        const RowRanges& keys, std::initializer_list<at::Tensor> tensors) {
  PlanKey key = make_key(kind, o, {tensors.begin()->narrow(0, 0, 0)});
  key.insert(key.end(), {queries.counts.size(0), queries.most, keys.most, queries.step, keys.step});
  for (const at::Tensor& t : tensors)
    key.insert(key.end(), {t.size(1), t.size(2), t.stride(0), t.stride(1)});
  return key;
}

at::Tensor like_lse(const at::Tensor& q, const RowRanges& queries) {
  return at::empty({queries.counts.size(0), q.size(1), queries.most, 1},
                   q.options().dtype(at::kFloat));
}

template <class Attributes>
void set_ranges(Attributes& attributes, fe::graph::Graph& graph, const RowRanges& queries,
                const RowRanges& keys, const AttentionOptions& o) {
  set_mask(attributes, queries.most, keys.most, o);
  const int64_t b = queries.counts.size(0);
  attributes.set_padding_mask(true)
      .set_seq_len_q(counts(graph, kCounts, b))
      .set_seq_len_kv(counts(graph, kKeyCounts, b));
}

Plan& ranges_forward_plan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& out, const at::Tensor& lse, const RowRanges& queries,
                          const RowRanges& keys, const AttentionOptions& o) {
  return find_plan(make_ranges_key(kRangesForward, o, queries, keys, {q, k, v, out}),
                   [&](fe::graph::Graph& graph) {
                     fe::graph::SDPA_attributes attributes;
                     attributes.set_name("attention over ranges").set_generate_stats(true);
                     set_ranges(attributes, graph, queries, keys, o);
                     auto [out_node, lse_node] =
                         graph.sdpa(input(graph, {kQ, q, queries}), input(graph, {kK, k, keys}),
                                    input(graph, {kV, v, keys}), attributes);
                     describe(out_node, graph, {kOut, out, queries});
                     describe(lse_node, kLse, lse);
                     out_node->set_output(true);
                     lse_node->set_output(true);
                   });
}

Plan& ranges_backward_plan(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                           const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                           const RowRanges& queries, const RowRanges& keys,
                           const AttentionOptions& o) {
  return find_plan(
      make_ranges_key(kRangesBackward, o, queries, keys, {q, k, v, out, dout, dq, dk, dv}),
      [&](fe::graph::Graph& graph) {
        fe::graph::SDPA_backward_attributes attributes;
        attributes.set_name("attention over ranges, backward")
            .set_deterministic_algorithm(o.deterministic);
        set_ranges(attributes, graph, queries, keys, o);
        auto [dq_node, dk_node, dv_node] = graph.sdpa_backward(
            input(graph, {kQ, q, queries}), input(graph, {kK, k, keys}),
            input(graph, {kV, v, keys}), input(graph, {kOut, out, queries}),
            input(graph, {kDOut, dout, queries}), input(graph, kLse, lse), attributes);
        describe(dq_node, graph, {kDQ, dq, queries});
        describe(dk_node, graph, {kDK, dk, keys});
        describe(dv_node, graph, {kDV, dv, keys});
        for (const Node& node : {dq_node, dk_node, dv_node}) node->set_output(true);
      });
}

// The tensors and their offsets, in elements.
Bindings bindings(std::initializer_list<Ranged> tensors, const RowRanges& queries,
                  const RowRanges& keys) {
  Bindings all;
  for (const Ranged& t : tensors) {
    all.emplace_back(t.id, t.rows);
    all.emplace_back(t.id + kOffsetsOf, t.ranges.offsets.mul(t.rows.stride(0)));
  }
  all.emplace_back(kCounts, queries.counts);
  all.emplace_back(kKeyCounts, keys.counts);
  return all;
}

RowRanges some_samples(const RowRanges& all, int64_t first, int64_t count) {
  if (count == all.counts.size(0)) return all;
  return {all.offsets.narrow(0, first, count + 1), all.counts.narrow(0, first, count).clone(),
          all.most, all.step};
}

AttentionParts parts_of_ranges(const at::Tensor& q, const at::Tensor& k, const RowRanges& queries,
                               const RowRanges& keys, bool deterministic) {
  return attention_parts(queries.counts.size(0), q.size(1), k.size(1), queries.most, keys.most,
                         deterministic);
}

}  // namespace

std::string why_not_cudnn_ranges(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const QueryKeyRanges& ranges, const AttentionOptions& options) {
  const RowRanges &queries = ranges.queries, &keys = ranges.keys;
  constexpr int64_t kMost = int64_t{1} << 31;
  for (const at::Tensor& t : {q, k, v})
    if (t.size(0) * t.stride(0) >= kMost) return "offsets of rows do not fit in 32 bits";
  const AttentionParts parts = parts_of_ranges(q, k, queries, keys, options.deterministic);
  if (parts.heads < q.size(1)) return "the scores of a sample need more than 4 GiB";
  const at::Tensor lse = at::empty({queries.counts.size(0), q.size(1), queries.most, 1},
                                   q.options().dtype(at::kFloat));
  const at::Tensor out = at::empty({q.size(0), q.size(1), v.size(2)}, q.options());
  const Plan& forward = ranges_forward_plan(q, k, v, out, lse, queries, keys, options);
  if (!forward.failure.empty()) return forward.failure;
  const int64_t b = queries.counts.size(0);
  const std::vector<int64_t> sizes = b % parts.samples == 0
                                         ? std::vector<int64_t>{parts.samples}
                                         : std::vector<int64_t>{parts.samples, b % parts.samples};
  for (const int64_t count : sizes) {
    const Plan& backward = ranges_backward_plan(out, q, k, v, out, lse.narrow(0, 0, count), q, k, v,
                                                some_samples(queries, 0, count),
                                                some_samples(keys, 0, count), options);
    if (!backward.failure.empty()) return backward.failure;
  }
  return "";
}

bool cudnn_has_ranges_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& out, const QueryKeyRanges& ranges,
                              const AttentionOptions& options) {
  constexpr int64_t kMost = int64_t{1} << 31;
  for (const at::Tensor& t : {q, k, v})
    if (t.size(0) * t.stride(0) >= kMost) return false;  // offsets do not fit in 32 bits
  return ranges_forward_plan(q, k, v, out, like_lse(q, ranges.queries), ranges.queries, ranges.keys,
                             options)
      .failure.empty();
}

at::Tensor cudnn_ranges_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& out, const QueryKeyRanges& ranges,
                                const AttentionOptions& options) {
  const RowRanges &queries = ranges.queries, &keys = ranges.keys;
  const at::Tensor lse = like_lse(q, queries);
  Bindings all = bindings({{kQ, q, queries}, {kK, k, keys}, {kV, v, keys}, {kOut, out, queries}},
                          queries, keys);
  all.emplace_back(kLse, lse);
  execute(ranges_forward_plan(q, k, v, out, lse, queries, keys, options), all);
  return lse;
}

void cudnn_ranges_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                           const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                           const QueryKeyRanges& ranges, const AttentionOptions& options) {
  const RowRanges &queries = ranges.queries, &keys = ranges.keys;
  const AttentionParts parts = parts_of_ranges(q, k, queries, keys, options.deterministic);
  const int64_t b = queries.counts.size(0);
  for (int64_t first = 0; first < b; first += parts.samples) {
    const int64_t count = std::min(parts.samples, b - first);
    const RowRanges some = some_samples(queries, first, count),
                    some_keys = some_samples(keys, first, count);
    const at::Tensor sums = lse.narrow(0, first, count);
    Bindings all = bindings({{kQ, q, some},
                             {kK, k, some_keys},
                             {kV, v, some_keys},
                             {kOut, out, some},
                             {kDOut, dout, some},
                             {kDQ, dq, some},
                             {kDK, dk, some_keys},
                             {kDV, dv, some_keys}},
                            some, some_keys);
    all.emplace_back(kLse, sums);
    execute(ranges_backward_plan(dout, q, k, v, out, sums, dq, dk, dv, some, some_keys, options),
            all);
  }
}

}  // namespace megatron
