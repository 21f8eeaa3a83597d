#include "megatron/transformer/attention/chunked_cross_attention.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// [l m, b, ...] -> [m, l b, ...]
at::Tensor split_rows(const at::Tensor& x, const ChunkedRows& chunks) {
  const int64_t b = x.size(1), h = x.size(2);
  return x.view({chunks.l, chunks.m, b, h}).transpose(0, 1).reshape({chunks.m, chunks.l * b, h});
}

// [m, l b, h] -> [l m, b, h]
at::Tensor join_rows(const at::Tensor& x, const ChunkedRows& chunks) {
  const int64_t b = x.size(1) / chunks.l, h = x.size(2);
  return x.view({chunks.m, chunks.l, b, h}).transpose(0, 1).reshape({chunks.l * chunks.m, b, h});
}

at::Tensor zero_rows(const at::Tensor& x, int64_t rows) {
  return at::zeros({rows, x.size(1), x.size(2)}, x.options());
}

}  // namespace

at::Tensor rows_of_chunks(const at::Tensor& x, const ChunkedRows& chunks) {
  const int64_t first = chunks.first();
  if (first == chunks.m) return split_rows(x.contiguous(), chunks);
  return split_rows(at::cat({x.narrow(0, 0, first), zero_rows(x, chunks.m - first),
                             x.narrow(0, first, chunks.s - first)}),
                    chunks);
}

at::Tensor samples_of_chunks(const at::Tensor& samples, int64_t chunks) {
  return (samples.unsqueeze(0) * chunks + at::arange(chunks, samples.options()).unsqueeze(1))
      .flatten();
}

RetrievedChunks::RetrievedChunks(at::Tensor states, const at::Tensor& there,
                                 const ChunkedRows& rows, int64_t retrieved_length)
    : encoded(std::move(states)), chunks(rows) {
  const int64_t b = there.size(0), k = there.size(2), r = retrieved_length;
  check_shape("which neighbours are there", there, {b, chunks.l, k});
  const at::Tensor none = there.transpose(0, 1) == 0;        // [l, b, k]
  const at::Tensor nothing = none.all(2, /*keepdim=*/true);  // [l, b, 1]
  // The softmax of chunks without a neighbour has something to sum; nobody reads the result.
  mask = none.logical_and(nothing.logical_not())
             .unsqueeze(2)
             .expand({chunks.l, b, r, k})
             .reshape({chunks.l * b, 1, 1, r * k});
  const at::Tensor read = nothing.logical_not().repeat_interleave(chunks.m, 0);
  rows_read = at::cat({at::zeros({chunks.first() - 1, b, 1}, read.options()),
                       read.narrow(0, 0, chunks.s - chunks.first() + 1)});
}

RetrievedChunks::RetrievedChunks(std::shared_ptr<const DecodedChunks> rows, at::Tensor states)
    : encoded(std::move(states)), chunks(rows->length, rows->length), decoded(std::move(rows)) {}

// q [t, 1, n d] -> [t, 1, n d]; rows that read nothing are zeros.
at::Tensor ChunkedCrossAttention::read_kept(const at::Tensor& q, CrossKVCache& kept,
                                            const LayerContext& context) {
  const RetrievedChunks& retrieved = *context.pass.retrieved;
  const DecodedChunks& chunks = *retrieved.decoded;
  const int64_t t = q.size(0), d = config_.kv_channels, width = heads_ * d;
  const int64_t keys = chunks.mask.size(3), groups = chunks.sources.size(0);
  at::Tensor memory = kept.keys_and_values.rows(context.pass.decoding->batch.num_slots,
                                                {keys, heads_, 2 * d}, q.options());
  at::Tensor all = memory;  // [slots + c, keys, n, 2 d]
  if (retrieved.encoded.defined()) {
    const at::Tensor kv =
        linear_kv_.forward(retrieved.encoded).view({keys, -1, heads_, 2 * d}).transpose(0, 1);
    all = at::cat({memory, kv});
    memory.index_copy_(0, chunks.last_slots, kv.index_select(0, chunks.last_chunks));
  }
  if (groups == 0) return at::zeros_like(q);
  const at::Tensor kv = all.index_select(0, chunks.sources).transpose(0, 1);
  const at::Tensor zero = at::zeros({1, width}, q.options());
  const at::Tensor queries = at::cat({q.view({t, width}), zero})
                                 .index_select(0, chunks.queries.flatten())
                                 .view({-1, groups, heads_, d});
  AttentionOptions options = attention_options(context.pass, {}, {});
  options.mask = chunks.mask.expand({groups, 1, queries.size(0), keys});
  const at::Tensor y = core_attention(queries, kv.narrow(3, 0, d), kv.narrow(3, d, d), options);
  return at::cat({y.reshape({-1, width}), zero}).index_select(0, chunks.places).view({t, 1, width});
}

SublayerOutput ChunkedCrossAttention::forward(const at::Tensor& x, const LayerContext& context,
                                              bool add) {
  MEGATRON_ASSERT(context.pass.retrieved != nullptr, "chunked cross attention without neighbours");
  const RetrievedChunks& retrieved = *context.pass.retrieved;
  const ChunkedRows& chunks = retrieved.chunks;
  const at::Tensor normed = norm_ != nullptr ? norm_->forward(x) : x;
  if (retrieved.decoded != nullptr) {
    auto& kept = static_cast<CrossKVCache&>(*context.state);
    const at::Tensor q = linear_q_.forward(normed.to(linear_q_.weight().value.scalar_type()));
    const at::Tensor out = linear_proj_.forward(read_kept(q, kept, context));
    const DecodedChunks& rows = *retrieved.decoded;
    const at::Tensor reads = (rows.places < rows.queries.numel()).view({-1, 1, 1});
    const at::Tensor result = at::where(reads, out, at::zeros({}, out.options()));
    return add ? SublayerOutput{result + x, {}} : SublayerOutput{result, x};
  }
  const at::Tensor q = linear_q_.forward(normed.to(retrieved.encoded.scalar_type()));
  const at::Tensor kv = linear_kv_.forward(retrieved.encoded);
  const int64_t b = q.size(1), width = q.size(2), keys = retrieved.mask.size(3);
  check_shape("rows of chunks", q, {chunks.s, b, width});
  check_shape("encoded neighbours", kv.view({keys, -1, 2 * width}),
              {keys, chunks.l * b, 2 * width});
  // the last row of the first chunk and those after it, filled up behind the last one
  const int64_t before = chunks.first() - 1, reading = chunks.s - before;
  const at::Tensor queries =
      split_rows(at::cat({q.narrow(0, before, reading), zero_rows(q, chunks.m - 1)}), chunks);
  const TokenPositions& place = context.pass.place;
  AttentionOptions options = attention_options(
      context.pass,
      {samples_of_chunks(place.sample, chunks.l), at::arange(chunks.m, place.position.options())},
      at::arange(keys, place.position.options()));
  options.mask = retrieved.mask.expand({chunks.l * b, 1, chunks.m, keys});
  const at::Tensor y = attend(queries, kv.view({keys, chunks.l * b, 2 * width}), options)
                           .reshape({chunks.m, chunks.l * b, width});
  const at::Tensor rows =
      at::cat({zero_rows(q, before), join_rows(y, chunks).narrow(0, 0, reading)});
  const at::Tensor out = linear_proj_.forward(rows);
  const at::Tensor own = retrieved.rows_read.narrow(0, context.pass.first_row, out.size(0));
  const at::Tensor result = at::where(own, out, at::zeros({}, out.options()));
  if (add) return {result + x, {}};
  return {result, x};
}

}  // namespace megatron
