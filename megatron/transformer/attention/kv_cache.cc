#include "megatron/transformer/attention/kv_cache.h"

#include "megatron/tensor/attention/ordered_attention.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// The distances of a part's rows to the positions from `from` on; undefined: there is no bias.
at::Tensor bias_of_part(const at::Tensor& bias, const RaggedPart& part, int64_t from) {
  if (!bias.defined()) return {};
  const int64_t positions = (bias.size(1) + 1) / 2, end = part.first + part.count;
  return bias.narrow(1, positions - end + from, part.count + end - from - 1);
}

// Bool [1, 1, count, positions], True where a row may NOT attend to a position from `from` on.
at::Tensor mask_of_part(const RaggedPart& part, int64_t from, at::Device device) {
  const at::Tensor positions =
      at::arange(from, part.first + part.count, at::dtype(at::kLong).device(device));
  const at::Tensor ends = at::tensor(part.ends, at::kLong).to(device);
  return positions.unsqueeze(0).ge(ends.unsqueeze(1)).view({1, 1, part.count, -1});
}

}  // namespace

at::Tensor KVCache::attend(const AddedRows& added, const PagedRows& rows,
                           const AttentionOptions& options) {
  const at::Tensor q = append_rows(keys_, values_, rows, added);
  if (is_batch_invariant() && q.is_cuda())
    return ordered_rows(q, keys_.view(), values_.view(), rows, options);
  const auto several = [&](const RaggedPart& part, const at::Tensor& queries) {
    const int64_t from = first_seen(part, options);
    AttentionOptions of_part = options;
    of_part.distance_bias = bias_of_part(options.distance_bias, part, from);
    if (!part.ends.empty()) {
      of_part.causal = false;
      of_part.mask = mask_of_part(part, from, queries.device());
    }
    return core_attention(queries, keys_.gather(rows, part, from).unsqueeze(1),
                          values_.gather(rows, part, from).unsqueeze(1), of_part);
  };
  const auto single = [&](const at::Tensor& queries) {
    if (!options.distance_bias.defined())
      return paged_attention(queries, keys_.view(), values_.view(), rows, options, added.ahead);
    std::vector<at::Tensor> outs;
    for (int64_t i = 0; i < rows.single(); ++i)
      outs.push_back(
          several(rows.parts()[static_cast<size_t>(i)], queries.narrow(0, i, 1).unsqueeze(1)));
    return at::cat(outs).squeeze(1);
  };
  const int64_t singles = rows.single(), others = rows.rows() - singles;
  if (others > 0) {
    if (const std::optional<at::Tensor> chunks =
            attend_chunks(q.narrow(0, singles, others).squeeze(1), keys_, values_, rows, options)) {
      if (singles == 0) return chunks->unsqueeze(1);
      return at::cat({single(q.narrow(0, 0, singles).squeeze(1)), *chunks}).unsqueeze(1);
    }
  }
  return attend_parts(rows, q, single, several);
}

}  // namespace megatron
