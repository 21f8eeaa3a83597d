#include "megatron/tensor/attention/token_blocks.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/detail/attention_library.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [s, b, ...] as rows [s b, ...].
at::Tensor flat_rows(const at::Tensor& t) { return t.flatten(0, 1); }

// Log-sum-exps [b, n, s, 1] of samples as rows [b s, n], and back.
at::Tensor sums_of_rows(const at::Tensor& lse) {
  return lse.squeeze(3).transpose(1, 2).reshape({-1, lse.size(1)});
}
at::Tensor sums_of_samples(const at::Tensor& rows, int64_t s) {
  return rows.view({-1, s, rows.size(1)}).transpose(1, 2).contiguous().unsqueeze(3);
}

// Of the blocks: queries see the keys up to their own, of which no window hides one.
AttentionOptions of_blocks(const AttentionOptions& options) {
  AttentionOptions o = options;
  o.causal = true;
  o.window_left = -1;
  return o;
}

QueryKeyRanges both_ranges(const TokenBlocks& blocks) { return {blocks.ranges, blocks.ranges}; }

struct SavedBlocks : torch::CustomClassHolder {
  SavedBlocks(std::shared_ptr<const TokenBlocks> all, std::shared_ptr<const UnpaddedRows> borders,
              const AttentionOptions& given)
      : blocks(std::move(all)), documents(std::move(borders)), options(given) {}
  std::shared_ptr<const TokenBlocks> blocks;
  std::shared_ptr<const UnpaddedRows> documents;
  AttentionOptions options;

  // Of the log-sum-exps of causal attention, the rows of queries that see later keys.
  const at::Tensor& places() const {
    return documents != nullptr ? blocks->document_places : blocks->queries;
  }
  QueryKeyRanges documents_as_ranges() const {
    const RowRanges ranges{documents->offsets, documents->counts, documents->length,
                           documents->step};
    return {ranges, ranges};
  }
};

// Causal attention alone: of samples, or within documents. Its log-sum-exps are rows: t b + i of
// position t of sample i, or TokenBlocks::document_places.
at::Tensor causal_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& out, const SavedBlocks& pass) {
  if (pass.documents != nullptr)
    return sums_of_rows(cudnn_ranges_forward(flat_rows(q), flat_rows(k), flat_rows(v),
                                             flat_rows(out), pass.documents_as_ranges(),
                                             pass.options));
  const int64_t g = k.size(2), s = q.size(0), b = q.size(1), n = q.size(2);
  return cudnn_attention_forward(fold_groups(q, g), fold_groups(k, g), fold_groups(v, g),
                                 fold_groups(out, g), pass.options)
      .view({b, n, s})
      .permute({2, 0, 1})
      .reshape({s * b, n});
}

void causal_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                     const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                     const SavedBlocks& pass) {
  if (pass.documents != nullptr)
    return cudnn_ranges_backward(flat_rows(dout), flat_rows(q), flat_rows(k), flat_rows(v),
                                 flat_rows(out), sums_of_samples(lse, pass.documents->length),
                                 flat_rows(dq), flat_rows(dk), flat_rows(dv),
                                 pass.documents_as_ranges(), pass.options);
  const int64_t g = k.size(2), s = q.size(0), b = q.size(1), n = q.size(2);
  const at::Tensor sums =
      lse.view({s, b, n}).permute({1, 2, 0}).contiguous().view({b * g, n / g, s, 1});
  const auto folded = [g](const at::Tensor& x) { return fold_groups(x, g); };
  cudnn_attention_backward(folded(dout), folded(q), folded(k), folded(v), folded(out), sums,
                           folded(dq), folded(dk), folded(dv), pass.options);
}

at::Tensor taken(const at::Tensor& x, const at::Tensor& rows) {
  return flat_rows(x).index_select(0, rows);
}

struct BlocksForward {
  at::Tensor out;  // [s, b, n, v]
  at::Tensor lse;  // of causal_forward(), but of all keys
};

BlocksForward attend_with_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const SavedBlocks& pass) {
  const TokenBlocks& blocks = *pass.blocks;
  const int64_t n = q.size(2);
  const at::Tensor out = at::empty({q.size(0), q.size(1), n, v.size(3)}, q.options());
  const at::Tensor lse = causal_forward(q, k, v, out, pass);
  const at::Tensor later = at::empty({blocks.tokens, n, v.size(3)}, q.options());
  const at::Tensor of_later =
      sums_of_rows(cudnn_ranges_forward(taken(q, blocks.queries), taken(k, blocks.keys),
                                        taken(v, blocks.keys), later, both_ranges(blocks),
                                        of_blocks(pass.options)))
          .index_select(0, blocks.places);
  const at::Tensor of_earlier = lse.index_select(0, pass.places()),
                   both = at::logaddexp(of_earlier, of_later);
  const auto part = [&](const at::Tensor& x, const at::Tensor& sums) {
    return x.to(both.scalar_type()).mul_((sums - both).exp_().unsqueeze(2));
  };
  flat_rows(out).index_copy_(0, blocks.queries,
                             part(taken(out, blocks.queries), of_earlier)
                                 .add_(part(later, of_later))
                                 .to(out.scalar_type()));
  lse.index_copy_(0, pass.places(), both);
  return {out, lse};
}

struct BlocksFunction : torch::autograd::Function<BlocksFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const c10::intrusive_ptr<SavedBlocks>& pass) {
    const at::NoGradGuard no_grad;
    const BlocksForward found = attend_with_blocks(q, k, v, *pass);
    variable_list saved = {q, k, v};
    if (!pass->options.recompute) saved.insert(saved.end(), {found.out, found.lse});
    context->save_for_backward(saved);
    context->saved_data["pass"] = c10::IValue::make_capsule(pass);
    return found.out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto pass =
        c10::static_intrusive_pointer_cast<SavedBlocks>(context->saved_data.at("pass").toCapsule());
    const TokenBlocks& blocks = *pass->blocks;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const at::NoGradGuard no_grad;
    const BlocksForward found =
        saved.size() > 3 ? BlocksForward{saved[3], saved[4]} : attend_with_blocks(q, k, v, *pass);
    const at::Tensor dout = grads[0].contiguous();
    const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
    const at::Tensor dq = like(q), dk = like(k), dv = like(v);
    causal_backward(dout, q, k, v, found.out, found.lse, dq, dk, dv, *pass);
    const at::Tensor queries = taken(q, blocks.queries), keys = taken(k, blocks.keys),
                     values = taken(v, blocks.keys);
    const at::Tensor dqueries = like(queries), dkeys = like(keys), dvalues = like(values);
    const int64_t most = blocks.ranges.most;
    const at::Tensor sums =
        at::zeros({blocks.ranges.counts.size(0) * most, q.size(2)}, found.lse.options())
            .index_copy_(0, blocks.places, found.lse.index_select(0, pass->places()));
    cudnn_ranges_backward(taken(dout, blocks.queries), queries, keys, values,
                          taken(found.out, blocks.queries), sums_of_samples(sums, most), dqueries,
                          dkeys, dvalues, both_ranges(blocks), of_blocks(pass->options));
    // No row is there twice.
    flat_rows(dq).index_add_(0, blocks.queries, dqueries);
    flat_rows(dk).index_add_(0, blocks.keys, dkeys);
    flat_rows(dv).index_add_(0, blocks.keys, dvalues);
    return {dq, dk, dv, {}};
  }
};

}  // namespace

TokenBlocks make_token_blocks(std::span<const TokenRun> runs, int64_t samples, int64_t s,
                              std::span<const DocumentPlace> documents) {
  constexpr int64_t kStep = 64;
  TokenBlocks out;
  std::vector<int32_t> offsets = {0}, counts;
  for (const TokenRun& run : runs) {
    if (run.count < 2) continue;
    counts.push_back(static_cast<int32_t>(run.count - 1));
    offsets.push_back(offsets.back() + counts.back());
    out.ranges.most = std::max(out.ranges.most, run.count - 1);
  }
  out.ranges.most = (out.ranges.most + kStep - 1) / kStep * kStep;
  out.tokens = offsets.back();
  std::vector<int64_t> queries, keys, places, document_places;
  int64_t block = 0;
  // Of each position the place of its log-sum-exp.
  std::vector<int64_t> place_of(documents.empty() ? 0 : static_cast<size_t>(samples * s));
  if (!documents.empty()) {
    const int64_t longest = make_document_rows(documents, s, samples).length;
    for (size_t i = 0; i < documents.size(); ++i)
      for (int64_t j = 0; j < documents[i].length; ++j)
        place_of[static_cast<size_t>(documents[i].sample * s + documents[i].begin + j)] =
            static_cast<int64_t>(i) * longest + j;
  }
  for (const TokenRun& run : runs) {
    if (run.count < 2) continue;
    for (int64_t i = 0; i + 1 < run.count; ++i) {
      const int64_t key = run.first + run.count - 1 - i;
      keys.push_back(key * samples + run.sample);
      queries.push_back((key - 1) * samples + run.sample);
      places.push_back(block * out.ranges.most + i);
      if (!documents.empty())
        document_places.push_back(place_of[static_cast<size_t>(run.sample * s + key - 1)]);
    }
    ++block;
  }
  if (!counts.empty()) {
    counts.resize(std::bit_ceil(counts.size()), 0);
    offsets.resize(counts.size() + 1, offsets.back());
  }
  out.queries = at::tensor(queries, at::kLong);
  out.keys = at::tensor(keys, at::kLong);
  out.places = at::tensor(places, at::kLong);
  if (!documents.empty()) out.document_places = at::tensor(document_places, at::kLong);
  out.ranges.offsets = at::tensor(offsets, at::kInt);
  out.ranges.counts = at::tensor(counts, at::kInt);
  return out;
}

std::shared_ptr<const TokenBlocks> to_device(const std::shared_ptr<const TokenBlocks>& blocks,
                                             at::Device device) {
  if (blocks == nullptr) return nullptr;
  auto out = std::make_shared<TokenBlocks>(*blocks);
  for (at::Tensor* tensor : {&out->queries, &out->keys, &out->places, &out->ranges.offsets,
                             &out->ranges.counts, &out->document_places})
    if (tensor->defined()) *tensor = to_device(*tensor, device);
  return out;
}

std::string why_not_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const TokenBlocks& blocks, const UnpaddedRows* documents,
                           const AttentionOptions& options) {
  if (!q.is_cuda()) return "it needs a CUDA device";
  if (is_batch_invariant()) return "--batch-invariant-mode has one kernel";
  if (options.backend != AttentionBackend::kAuto && options.backend != AttentionBackend::kFused)
    return "--attention-backend names another one";
  if (options.sinks.defined()) return "sinks are given";
  if ((documents != nullptr) != blocks.document_places.defined())
    return "the documents of the rows are not known";
  if (std::string reason = why_unfused(q, k, v, options, /*knows_windows=*/true); !reason.empty())
    return reason;
  const auto rows = [&](const at::Tensor& x) {
    return at::empty({blocks.tokens, x.size(2), x.size(3)}, x.options());
  };
  if (std::string reason =
          why_not_cudnn_ranges(rows(q), rows(k), rows(v), both_ranges(blocks), of_blocks(options));
      !reason.empty())
    return reason;
  const int64_t g = k.size(2);
  if (documents == nullptr)
    return why_not_cudnn(fold_groups(q, g), fold_groups(k, g), fold_groups(v, g), options);
  const RowRanges ranges{documents->offsets, documents->counts, documents->length, documents->step};
  return why_not_cudnn_ranges(flat_rows(q), flat_rows(k), flat_rows(v), {ranges, ranges}, options);
}

at::Tensor attention_with_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::shared_ptr<const TokenBlocks>& blocks,
                                 const std::shared_ptr<const UnpaddedRows>& documents,
                                 const AttentionOptions& options) {
  MEGATRON_ASSERT(options.causal && blocks->tokens > 0, "blocks in attention without causality");
  MEGATRON_ASSERT((documents != nullptr) == blocks->document_places.defined(),
                  "blocks of other documents");
  return BlocksFunction::apply(q, k, v,
                               c10::make_intrusive<SavedBlocks>(blocks, documents, options));
}

}  // namespace megatron
