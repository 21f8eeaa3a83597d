#include "megatron/transformer/context_parallel/context_parallel.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/detail/context_parallel.h"

namespace megatron {
namespace {

std::string why_length_does_not_divide(int64_t s, int64_t c) {
  if (c <= 1 || s % (2 * c) == 0) return "";
  return cat("a sequence of ", s, " tokens is not divisible by ", 2 * c,
             ", twice --context-parallel-size ", c);
}

std::string length_hint(int64_t s, int64_t c) {
  return cat("--seq-length ", std::max<int64_t>(1, s / (2 * c)) * 2 * c, " or another multiple of ",
             2 * c);
}

void check_length(int64_t s, int64_t c) {
  const std::string reason = why_length_does_not_divide(s, c);
  MEGATRON_CHECK(reason.empty(), reason, "\nhint: ", length_hint(s, c));
}

const ProcessGroup& level(const ParallelGroups& groups, size_t index) {
  MEGATRON_CHECK(groups.cp_hierarchy.size() == 2, "--cp-comm-type a2a+p2p needs two levels, got ",
                 groups.cp_hierarchy.size(),
                 "\nhint: --hierarchical-context-parallel-sizes with the sizes of the inner and "
                 "the outer level");
  return groups.cp_hierarchy[index];
}

}  // namespace

at::Tensor zigzag_positions(int64_t s, int64_t c, int64_t rank, const at::Device& device) {
  MEGATRON_ASSERT(c >= 1 && rank >= 0 && rank < c, "rank ", rank, " of ", c);
  check_length(s, c);
  const auto type = at::TensorOptions().dtype(at::kLong).device(device);
  if (c == 1) return at::arange(s, type);
  const int64_t chunk = s / (2 * c), last = 2 * c - 1 - rank;
  return at::cat({at::arange(rank * chunk, (rank + 1) * chunk, type),
                  at::arange(last * chunk, (last + 1) * chunk, type)});
}

at::Tensor zigzag_slice(const at::Tensor& x, int64_t dim, const ProcessGroup& cp) {
  if (cp.size() == 1) return x;
  const int64_t s = x.size(dim), c = cp.size(), rank = cp.rank();
  check_length(s, c);
  const int64_t chunk = s / (2 * c);
  return at::cat(
             {x.narrow(dim, rank * chunk, chunk), x.narrow(dim, (2 * c - 1 - rank) * chunk, chunk)},
             dim)
      .contiguous();
}

at::Tensor zigzag_gather(const at::Tensor& x, int64_t dim, const ProcessGroup& cp) {
  if (cp.size() == 1) return x;
  const at::NoGradGuard no_grad;
  const at::Tensor part = x.movedim(dim, 0).contiguous();
  std::vector<int64_t> shape = part.sizes().vec();
  shape.insert(shape.begin(), cp.size());
  at::Tensor parts = at::empty(shape, part.options());
  cp.all_gather(parts, part)->wait();
  return join_zigzag(parts).movedim(0, dim).contiguous();
}

namespace {

struct SavedContextGroup : torch::CustomClassHolder {
  ProcessGroup group;
};

struct GatherSequence : torch::autograd::Function<GatherSequence> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& part,
                            const ProcessGroup& cp) {
    auto saved = c10::make_intrusive<SavedContextGroup>();
    saved->group = cp;
    context->saved_data["group"] = c10::IValue::make_capsule(saved);
    return zigzag_gather(part, 0, cp);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = c10::static_intrusive_pointer_cast<SavedContextGroup>(
        context->saved_data["group"].toCapsule());
    const at::NoGradGuard no_grad;
    const at::Tensor& grad = grads[0];
    const at::Tensor parts =
        split_zigzag(grad.to(accumulate_type(grad)), saved->group.size()).contiguous();
    at::Tensor own = at::empty(parts.sizes().slice(1), parts.options());
    saved->group.reduce_scatter(own, parts)->wait();
    return {own.to(grad.scalar_type()), {}};
  }
};

}  // namespace

at::Tensor gather_sequence(const at::Tensor& part, const ProcessGroup& cp) {
  return cp.size() == 1 ? part : GatherSequence::apply(part, cp);
}

at::Tensor join_zigzag(const at::Tensor& parts) {
  const int64_t c = parts.size(0), local = parts.size(1);
  MEGATRON_ASSERT(local % 2 == 0, "a zig-zag part of ", local, " tokens");
  std::vector<int64_t> shape = parts.sizes().slice(1).vec();
  shape[0] = c * local / 2;
  const at::Tensor early = parts.narrow(1, 0, local / 2),
                   late = parts.narrow(1, local / 2, local / 2).flip(0);
  return at::cat({early.reshape(shape), late.reshape(shape)});
}

at::Tensor split_zigzag(const at::Tensor& sequence, int64_t c) {
  const int64_t s = sequence.size(0);
  MEGATRON_ASSERT(s % (2 * c) == 0, "a sequence of ", s, " tokens over ", c, " ranks");
  std::vector<int64_t> shape = sequence.sizes().vec();
  shape[0] = s / (2 * c);
  shape.insert(shape.begin(), c);
  return at::cat({sequence.narrow(0, 0, s / 2).reshape(shape),
                  sequence.narrow(0, s / 2, s / 2).reshape(shape).flip(0)},
                 1);
}

Packed::Packed(const std::vector<at::Tensor>& like, at::ScalarType type) {
  int64_t total = 0;
  for (const at::Tensor& t : like) total += t.numel();
  flat = at::empty({total}, like.front().options().dtype(type));
  int64_t offset = 0;
  for (const at::Tensor& t : like) {
    parts.push_back(flat.narrow(0, offset, t.numel()).view(t.sizes()));
    offset += t.numel();
  }
}

Packed Packed::copy(const std::vector<at::Tensor>& tensors) {
  Packed packed(tensors, tensors.front().scalar_type());
  for (size_t i = 0; i < tensors.size(); ++i) packed.parts[i].copy_(tensors[i]);
  return packed;
}

namespace {

// Bool [1, 1, queries, keys], True where the key is outside of the query's window.
at::Tensor window_mask(const AttentionOptions& options, const at::Tensor& query_position,
                       const at::Tensor& key_position) {
  const at::Tensor ahead = key_position.unsqueeze(0) - query_position.unsqueeze(1);
  at::Tensor outside = at::zeros(ahead.sizes(), ahead.options().dtype(at::kBool));
  if (options.window_left >= 0) outside = outside.logical_or(ahead < -options.window_left);
  if (options.window_right >= 0) outside = outside.logical_or(ahead > options.window_right);
  return outside.unsqueeze(0).unsqueeze(0);
}

}  // namespace

AttentionOptions ContextParallelPass::block(bool causal, const at::Tensor& query_position,
                                            const at::Tensor& key_position) const {
  AttentionOptions block = options;
  block.sinks.reset();  // added to the combination of all blocks
  block.causal = causal;
  block.mask = document_mask(document_ids, query_position, key_position);
  if (options.mask.defined()) {
    const at::Tensor own =
        options.mask.index_select(2, query_position).index_select(3, key_position);
    block.mask = block.mask.defined() ? block.mask.logical_or(own) : own;
  }
  if (has_two_sided_window()) {
    const at::Tensor outside = window_mask(options, query_position, key_position);
    block.mask = block.mask.defined() ? block.mask.logical_or(outside) : outside;
    block.window_left = block.window_right = -1;
  }
  block.place.position = query_position;
  block.key_position = key_position;
  return block;
}

at::Tensor document_mask(const at::Tensor& document_ids, const at::Tensor& query_position,
                         const at::Tensor& key_position) {
  if (!document_ids.defined()) return {};
  return document_ids.index_select(1, query_position)
      .unsqueeze(2)
      .ne(document_ids.index_select(1, key_position).unsqueeze(1))
      .unsqueeze(1);
}

at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const AttentionOptions& options,
                                      const at::Tensor& document_ids, ContextParallelType type,
                                      const ParallelGroups& groups, const ProcessGroup* ranks) {
  const ProcessGroup& cp = ranks != nullptr ? *ranks : groups.cp;
  const int64_t local = q.size(0), c = cp.size(), s = local * c;
  if (document_ids.defined()) check_shape("document_ids", document_ids, {q.size(1), s});
  if (c == 1) {
    AttentionOptions serial = options;
    if (document_ids.defined()) {
      const at::Tensor positions = zigzag_positions(s, 1, 0, q.device());
      serial.mask = document_mask(document_ids, positions, positions);
    }
    return core_attention(q, k, v, serial);
  }
  const auto whole = [&](const at::Tensor& queries, const at::Tensor& keys,
                         const at::Tensor& values, const AttentionOptions& o) {
    const ContextParallelPass pass{o, document_ids, {}};
    const at::Tensor positions =
        pass.by_place() ? zigzag_positions(queries.size(0), 1, 0, queries.device()) : at::Tensor();
    AttentionOptions own = pass.block(o.causal, positions, positions);
    own.sinks = o.sinks;
    return core_attention(queries, keys, values, own);
  };
  if (options.mask.defined()) {
    check_shape("mask", options.mask, {q.size(1), 1, s, s});
    MEGATRON_CHECK(type == ContextParallelType::kAllGather || type == ContextParallelType::kA2A,
                   "an attention mask in a ring of context-parallel ranks is not built",
                   "\nhint: --cp-comm-type all_gather or a2a");
  }
  check_shape("context parallel k", k, {local, q.size(1), -1, q.size(3)});
  check_shape("context parallel v", v, {local, q.size(1), k.size(2), -1});
  check_length(s, c);
  switch (type) {
    case ContextParallelType::kP2P:
      return ring_attention(q, k, v, options, document_ids, cp);
    case ContextParallelType::kAllGather:
      return all_gather_attention(q, k, v, options, document_ids, cp);
    case ContextParallelType::kA2A:
      return all_to_all_attention(q, k, v, options, cp, whole);
    case ContextParallelType::kA2AP2P: {
      const ProcessGroup& inner = level(groups, 0);
      const ProcessGroup& outer = level(groups, 1);
      return all_to_all_attention(q, k, v, options, inner,
                                  [&](const at::Tensor& queries, const at::Tensor& keys,
                                      const at::Tensor& values, const AttentionOptions& o) {
                                    return outer.size() == 1
                                               ? whole(queries, keys, values, o)
                                               : ring_attention(queries, keys, values, o,
                                                                document_ids, outer);
                                  });
    }
  }
  throw_error("internal error: unknown type of context parallelism");
}

std::string why_heads_do_not_divide(int64_t heads, int64_t ranks) {
  if (heads % ranks == 0) return "";
  return cat("--cp-comm-type a2a divides heads over ", ranks,
             " context-parallel ranks, but a tensor-parallel rank has ", heads,
             " query heads\nhint: sizes that divide ", heads, ": ", format_divisors(heads),
             "; or --cp-comm-type p2p or all_gather");
}

bool attends_in_rings(const TransformerConfig& model) {
  for (int64_t layer = 1; layer <= model.num_layers; ++layer) {
    const ContextParallelType type = model.context_parallel_type(layer);
    if (type == ContextParallelType::kP2P || type == ContextParallelType::kA2AP2P) return true;
  }
  return false;
}

void validate_context_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                               Violations& violations) {
  const int64_t c = parallel.context_parallel_size;
  const std::vector<int64_t>& levels = parallel.hierarchical_context_parallel_sizes;
  if (c <= 1) return;
  if (const std::string reason = why_length_does_not_divide(model.seq_length, c); !reason.empty())
    violations.add(reason, length_hint(model.seq_length, c));
  bool used[4] = {}, windowed_ring = false;
  for (int64_t layer = 1; layer <= model.num_layers; ++layer) {
    const ContextParallelType type = model.context_parallel_type(layer);
    used[static_cast<size_t>(type)] = true;
    const bool ring = type == ContextParallelType::kP2P || type == ContextParallelType::kA2AP2P;
    const std::vector<int64_t> window = model.window(layer);
    windowed_ring = windowed_ring || (ring && !window.empty() && window[0] >= 0);
  }
  if (model.rope_scaling_type == RopeScaling::kLongRope)
    violations.add("--rope-scaling-type longrope with --context-parallel-size above 1 is not built",
                   "its factors depend on the last token, which another rank may hold");
  const bool hierarchical = used[static_cast<size_t>(ContextParallelType::kA2AP2P)];
  if (model.recomputes("mla_up_proj") &&
      (hierarchical || used[static_cast<size_t>(ContextParallelType::kA2A)]))
    violations.add(
        "--recompute-modules mla_up_proj with --cp-comm-type a2a or a2a+p2p is not built",
        "the backward needs the heads that an all-to-all brought from other ranks; "
        "--cp-comm-type p2p or all_gather");
  if (windowed_ring)
    violations.add("--window-size cannot be used with the ring of --cp-comm-type p2p or a2a+p2p",
                   "--cp-comm-type all_gather or a2a");
  if (hierarchical && levels.empty())
    violations.add("--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes",
                   cat("two sizes whose product is ", c, ", the inner one first"));
  if (parallel.tensor_model_parallel_size < 1) return;  // a rule of its own reports it
  const int64_t heads = model.num_attention_heads / parallel.tensor_model_parallel_size;
  const auto check_heads = [&](int64_t ranks) {
    const std::string reason = why_heads_do_not_divide(heads, ranks);
    if (!reason.empty())
      violations.add(reason.substr(0, reason.find('\n')), reason.substr(reason.find("hint: ") + 6));
  };
  if (used[static_cast<size_t>(ContextParallelType::kA2A)]) check_heads(c);
  if (hierarchical && levels.size() == 2 && levels[0] > 0) check_heads(levels[0]);
}

}  // namespace megatron
