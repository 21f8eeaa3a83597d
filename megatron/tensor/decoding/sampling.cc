#include "megatron/tensor/decoding/sampling.h"

#include <algorithm>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/cross_entropy.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A copy on `device` of values of any trivial type, [values, bytes of one].
template <class T>
at::Tensor bytes_on(const std::vector<T>& values, at::Device device) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(values.size()), sizeof(T)}, at::kByte);
  if (!values.empty()) std::memcpy(bytes.data_ptr(), values.data(), values.size() * sizeof(T));
  return to_device(bytes, device);
}

template <class T>
const T* pointer_to(const at::Tensor& bytes) {
  return bytes.defined() ? static_cast<const T*>(bytes.const_data_ptr()) : nullptr;
}

bool changes_logits(const SamplingRow& row) {
  return row.num_edits > 0 || row.counts >= 0 || row.mask >= 0;
}

}  // namespace

VocabularyLogits::VocabularyLogits(const at::Tensor& logits, int64_t vocab_size,
                                   VocabularyShards shards)
    : shards_(std::move(shards)) {
  MEGATRON_ASSERT(logits.dim() == 2 && vocab_size < int64_t{1} << 20, "logits of ", vocab_size,
                  " ids");
  const int64_t held = logits.size(1);
  first_id_ = shards_.rank * held;
  columns_ = std::clamp<int64_t>(vocab_size - first_id_, 0, held);
  given_ = logits.contiguous();
  logits_ = given_.to(accumulate_type(logits));
  processed_ = logits_;
  extremes_ = extremes_of(arguments(logits_, {}));
}

at::Tensor VocabularyLogits::extremes_of(const SamplingLogits& args) const {
  const at::Tensor extremes = at::empty({3, args.rows}, logits_.options().dtype(at::kDouble));
  auto* out = extremes.data_ptr<double>();
  launch(
      logits_, args.rows, columns_,
      [&](int64_t begin, int64_t end) { process_logits_cpu(args, out, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(process_logits_cuda(args, out, stream)); });
  if (shards_.max) shards_.max(extremes);
  return extremes;
}

SamplingLogits VocabularyLogits::arguments(const at::Tensor& logits,
                                           const at::Tensor& largest) const {
  SamplingLogits args;
  args.dtype = to_dtype(logits.scalar_type());
  args.rows = logits.size(0);
  args.columns = columns_;
  args.stride = logits.size(1);
  args.first_id = first_id_;
  args.logits = logits.data_ptr();
  args.largest = pointer_to<double>(largest);
  return args;
}

VocabularyLogits::Told VocabularyLogits::told(const at::Tensor& ids) const {
  const int64_t n = ids.size(0);
  Told told{at::empty_like(ids), at::empty({3 * n}, extremes_.options())};
  const ToldDraws args{n, extremes_.const_data_ptr<double>(), ids.const_data_ptr<int64_t>(),
                       told.ids.data_ptr<int64_t>(), told.numbers.data_ptr<double>()};
  launch(
      ids, n, 1, [&](int64_t begin, int64_t end) { tell_draws_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(tell_draws_cuda(args, stream)); });
  return told;
}

LogProbabilities VocabularyLogits::log_probabilities(const at::Tensor& ids, int64_t n) const {
  if (is_batch_invariant()) return trained_log_probabilities(ids, n);
  return log_probabilities(arguments(logits_, extremes_[1]), logits_, {}, ids, n);
}

// As token_losses() in tensor_parallel/cross_entropy.h.
LogProbabilities VocabularyLogits::trained_log_probabilities(const at::Tensor& ids,
                                                             int64_t n) const {
  check_shape("ids with probabilities", ids, {logits_.size(0)});
  CrossEntropyParts parts = cross_entropy_parts(given_, ids - first_id_, columns_);
  const at::Tensor lse = combine_parts(parts, shards_.max, shards_.sum);
  LogProbabilities result = largest_of(arguments(logits_, extremes_[1]), logits_, n);
  result.chosen = (parts.target - lse).to(at::kFloat);
  result.top = (result.top.to(lse.scalar_type()) - lse.unsqueeze(1)).to(at::kFloat);
  return result;
}

LogProbabilities VocabularyLogits::drawn_log_probabilities(const at::Tensor& ids, int64_t n) const {
  MEGATRON_ASSERT(rows_.defined(), "nothing was drawn");
  return log_probabilities(drawn_arguments(), processed_, temperatures_, ids, n);
}

// The logarithm is taken once for each row, and everything else of one logit alone: a token's
// number is the same wherever it stands.
LogProbabilities VocabularyLogits::log_probabilities(const SamplingLogits& of,
                                                     const at::Tensor& logits,
                                                     const at::Tensor& temperature,
                                                     const at::Tensor& ids, int64_t n) const {
  check_shape("ids with probabilities", ids, {of.rows});
  const at::Tensor sums = at::empty({of.rows}, logits.options().dtype(at::kLong));
  launch(
      logits, of.rows, columns_,
      [&](int64_t begin, int64_t end) {
        sum_probabilities_cpu(of, sums.data_ptr<int64_t>(), begin, end);
      },
      [&](void* stream) {
        MEGATRON_CUDA_KERNEL(sum_probabilities_cuda(of, sums.data_ptr<int64_t>(), stream));
      });
  if (shards_.sum) shards_.sum(sums);
  const at::Tensor largest = extremes_[of.row != nullptr ? 2 : 1].unsqueeze(1);
  const at::Tensor log_sum = sums.to(at::kDouble).div(kWholeProbability).log().unsqueeze(1);
  const auto logarithm = [&](const at::Tensor& x) {
    at::Tensor y = x - largest;
    if (temperature.defined()) y = y / temperature;
    return (y - log_sum).to(at::kFloat);
  };
  LogProbabilities result = largest_of(of, logits, n);
  result.chosen = logarithm(logits_of(ids, logits).unsqueeze(1)).squeeze(1);
  result.top = logarithm(result.top);
  return result;
}

LogProbabilities VocabularyLogits::largest_of(const SamplingLogits& of, const at::Tensor& logits,
                                              int64_t n) const {
  const at::Tensor values = at::empty({of.rows, n}, extremes_.options());
  const at::Tensor ids = at::empty({of.rows, n}, extremes_.options().dtype(at::kLong));
  if (n == 0) return {{}, values, ids};
  auto* value = values.data_ptr<double>();
  auto* id = ids.data_ptr<int64_t>();
  launch(
      logits, of.rows, columns_,
      [&](int64_t begin, int64_t end) { largest_logits_cpu(of, n, value, id, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(largest_logits_cuda(of, n, value, id, stream)); });
  if (!shards_.gather) return {{}, values, ids};
  // Of equal values those of lower ranks, and with them lower ids, come first.
  const auto in_one_row = [&](const at::Tensor& all) {
    return all.permute({1, 0, 2}).reshape({of.rows, -1});
  };
  const auto [sorted, order] =
      in_one_row(shards_.gather(values)).sort(/*stable=*/true, /*dim=*/1, /*descending=*/true);
  return {{},
          sorted.narrow(1, 0, n),
          in_one_row(shards_.gather(ids)).gather(1, order.narrow(1, 0, n)).contiguous()};
}

at::Tensor VocabularyLogits::logits_of(const at::Tensor& ids, const at::Tensor& logits) const {
  at::Tensor values = at::full(ids.sizes(), -kInfinity, extremes_.options());
  if (columns_ > 0) {
    const at::Tensor column = ids - first_id_;
    const at::Tensor here = column.ge(0).logical_and(column.lt(columns_));
    const at::Tensor own = logits.gather(1, column.clamp(0, columns_ - 1).unsqueeze(1)).squeeze(1);
    values = at::where(here, own.to(at::kDouble), values);
  }
  if (shards_.max) shards_.max(values);
  return values;
}

void VocabularyLogits::select(SelectBy by) {
  const SamplingLogits args = drawn_arguments();
  auto* kept = static_cast<SamplingKept*>(kept_.data_ptr());
  const at::Tensor histogram =
      at::empty({args.rows, kSelectionBins}, logits_.options().dtype(at::kLong));
  int64_t* bins = histogram.data_ptr<int64_t>();
  for (int pass = 0; pass < selection_passes(args.dtype); ++pass) {
    launch(
        processed_, args.rows, columns_,
        [&](int64_t begin, int64_t end) {
          selection_histogram_cpu(args, by, pass, bins, begin, end);
        },
        [&](void* stream) {
          MEGATRON_CUDA_KERNEL(selection_histogram_cuda(args, by, pass, bins, stream));
        });
    if (shards_.sum) shards_.sum(histogram);
    launch(
        processed_, args.rows, kSelectionBins,
        [&](int64_t begin, int64_t end) {
          narrow_selection_cpu(args, by, pass, bins, kept, begin, end);
        },
        [&](void* stream) {
          MEGATRON_CUDA_KERNEL(narrow_selection_cuda(args, by, pass, bins, kept, stream));
        });
  }
  at::Tensor before;
  if (shards_.gather) {
    const at::Tensor ties = at::empty({args.rows}, histogram.options());
    launch(
        processed_, args.rows, columns_,
        [&](int64_t begin, int64_t end) {
          count_ties_cpu(args, kept, ties.data_ptr<int64_t>(), begin, end);
        },
        [&](void* stream) {
          MEGATRON_CUDA_KERNEL(count_ties_cuda(args, kept, ties.data_ptr<int64_t>(), stream));
        });
    before = shards_.gather(ties).narrow(0, 0, shards_.rank).sum(0).contiguous();
  }
  const auto* before_pointer = pointer_to<int64_t>(before);
  launch(
      processed_, args.rows, columns_,
      [&](int64_t begin, int64_t end) {
        place_ties_cpu(args, by, before_pointer, kept, begin, end);
      },
      [&](void* stream) {
        MEGATRON_CUDA_KERNEL(place_ties_cuda(args, by, before_pointer, kept, stream));
      });
}

void VocabularyLogits::process(const SamplingBatch& batch) {
  const at::Device device = logits_.device();
  const at::Tensor edit_ids = bytes_on(batch.edit_ids, device),
                   edit_values = bytes_on(batch.edit_values, device),
                   masks = bytes_on(batch.masks, device);
  int64_t mask_rows = 0;
  for (const SamplingRow& row : batch.rows) mask_rows = std::max<int64_t>(mask_rows, row.mask + 1);
  processed_ = logits_.clone();
  SamplingLogits args = arguments(processed_, {});
  args.row = pointer_to<SamplingRow>(rows_);
  args.edit_ids = pointer_to<int32_t>(edit_ids);
  args.edit_values = pointer_to<float>(edit_values);
  args.counts = pointer_to<int32_t>(batch.counts);
  args.masks = pointer_to<uint32_t>(masks);
  if (mask_rows > 0) args.mask_words = static_cast<int64_t>(batch.masks.size()) / mask_rows;
  extremes_ = extremes_of(args);
}

at::Tensor VocabularyLogits::draw(const SamplingBatch& batch) {
  const auto n = static_cast<int64_t>(batch.rows.size());
  MEGATRON_ASSERT(n == logits_.size(0), n, " ways to draw from ", logits_.size(0), " rows");
  rows_ = bytes_on(batch.rows, logits_.device());
  std::vector<double> temperatures;
  for (const SamplingRow& row : batch.rows)
    temperatures.push_back(row.temperature > 0.0 ? row.temperature : 1.0);
  temperatures_ = to_device(at::tensor(temperatures, at::kDouble).unsqueeze(1), logits_.device());
  if (std::ranges::any_of(batch.rows, changes_logits)) process(batch);
  for (const SelectBy by : {SelectBy::kCount, SelectBy::kProbability}) {
    if (!selects_any(batch.rows.data(), n, by)) continue;
    if (!kept_.defined()) {
      SamplingKept all;
      all.value = -kInfinity;
      kept_ = bytes_on(std::vector<SamplingKept>(batch.rows.size(), all), logits_.device());
    }
    select(by);
  }
  at::Tensor ids = draw_kept();
  if (std::ranges::none_of(batch.rows, [](const SamplingRow& row) { return row.counts >= 0; }))
    return ids;
  const SamplingLogits args = drawn_arguments();
  const auto* drawn = ids.const_data_ptr<int64_t>();
  auto* counts = batch.counts.data_ptr<int32_t>();
  launch(
      ids, n, 1,
      [&](int64_t begin, int64_t end) { count_tokens_cpu(args, drawn, counts, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(count_tokens_cuda(args, drawn, counts, stream)); });
  return ids;
}

at::Tensor VocabularyLogits::draw_kept() const {
  const SamplingLogits args = drawn_arguments();
  const at::Tensor best = at::empty({2, args.rows}, extremes_.options());
  launch(
      processed_, args.rows, columns_,
      [&](int64_t begin, int64_t end) {
        draw_tokens_cpu(args, best.data_ptr<double>(), begin, end);
      },
      [&](void* stream) {
        MEGATRON_CUDA_KERNEL(draw_tokens_cuda(args, best.data_ptr<double>(), stream));
      });
  if (!shards_.gather) return best[1].to(at::kLong);
  const at::Tensor all = shards_.gather(best);  // [size, 2, rows]
  const at::Tensor values = all.select(1, 0);
  return at::where(values == values.amax(0, /*keepdim=*/true), all.select(1, 1), kInfinity)
      .amin(0)
      .to(at::kLong);
}

VocabularyLogits VocabularyLogits::at_rows(const at::Tensor& index) const {
  VocabularyLogits some = *this;
  some.logits_ = logits_.index_select(0, index);
  some.given_ = given_.is_same(logits_) ? some.logits_ : given_.index_select(0, index);
  some.processed_ = processed_.is_same(logits_) ? some.logits_ : processed_.index_select(0, index);
  some.extremes_ = extremes_.index_select(1, index);
  if (rows_.defined()) {
    some.rows_ = rows_.index_select(0, index);
    some.temperatures_ = temperatures_.index_select(0, index);
  }
  if (kept_.defined()) some.kept_ = kept_.index_select(0, index);
  return some;
}

SamplingLogits VocabularyLogits::drawn_arguments() const {
  SamplingLogits args = arguments(processed_, extremes_[2]);
  args.row = pointer_to<SamplingRow>(rows_);
  args.kept = pointer_to<SamplingKept>(kept_);
  return args;
}

}  // namespace megatron
