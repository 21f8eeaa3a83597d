#include "megatron/training/dynamic_context/dynamic_context_batches.h"

#include <algorithm>
#include <bit>

#include "megatron/base/check.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {

namespace {

DynamicContextOptions options_of(const Arguments& arguments) {
  const TransformerConfig& c = arguments.transformer;
  const LayerCost layer =
      layer_cost(c, 1, {.tokens = c.seq_length, .rows = c.seq_length}, /*offloaded=*/false);
  DynamicContextOptions options;
  options.num_ranks = arguments.data_parallel_size() * arguments.parallel.context_parallel_size;
  options.max_tokens = arguments.parallel.max_seqlen_per_dp_cp_rank.value_or(1);
  // Multiply-adds of a layer: of a token, and of a token for each one before it
  options.linear_work = layer.weight_products();
  options.attention_work = layer.score_products() / static_cast<double>(c.seq_length);
  return options;
}

}  // namespace

DynamicContextBatches::DynamicContextBatches(const Arguments& arguments,
                                             const ParallelGroups& groups,
                                             std::unique_ptr<DataLoader> loader, c10::Device device)
    : micro_batch_size_(arguments.training.micro_batch_size),
      alignment_(arguments.parallel.sequence_parallel ? groups.tp.size() : 1),
      options_(options_of(arguments)),
      groups_(groups),
      device_(device),
      loader_(std::move(loader)) {
  const Columns& columns = loader_->dataset().columns();
  for (const Column& column : columns)
    MEGATRON_CHECK(!column.split || column.shape[0] == columns.sequence_length(),
                   "--hybrid-context-parallel divides sequences into documents, but column ",
                   column.name, " has a length of its own: ", columns.text());
}

// Joins neighbouring documents as long as they fit on one rank.
void DynamicContextBatches::cut(const std::shared_ptr<const MicroBatch>& source, int64_t row) {
  const std::vector<int32_t>& starts = source->document_starts[static_cast<size_t>(row)];
  int64_t begin = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t end = i + 1 < starts.size() ? starts[i + 1] : source->sequence_length();
    const int64_t following = i + 2 < starts.size() ? starts[i + 2] : source->sequence_length();
    if (i + 1 < starts.size() && following - begin <= options_.max_tokens) continue;
    pieces_.push_back({source, row, begin, end - begin});
    begin = end;
  }
}

int64_t DynamicContextBatches::begin_step(int64_t global_batch_size) {
  MEGATRON_ASSERT(next_ == own_.size(), "a step begins before the last one has ended");
  pieces_.clear();
  for (int64_t read = 0; read < global_batch_size; read += micro_batch_size_) {
    const std::shared_ptr<const MicroBatch> source = loader_->next();
    MEGATRON_CHECK(source, "the training samples are used up after ", loader_->consumed(), " of ",
                   loader_->dataset().size());
    for (int64_t row = 0; row < source->micro_batch_size; ++row) cut(source, row);
  }
  std::vector<int64_t> lengths;
  for (const Piece& piece : pieces_) lengths.push_back(piece.length);
  plan_ = plan_dynamic_context(lengths, options_);
  own_.clear();
  next_ = 0;
  const int64_t rank = groups_.dp_cp.rank();
  for (const PlacedDocument& document : plan_.documents)
    if (document.first_rank <= rank && rank < document.first_rank + document.width)
      own_.push_back(document);
  return std::max<int64_t>(1, static_cast<int64_t>(own_.size()));
}

Batch DynamicContextBatches::empty_pass() const {
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device_);
  Batch batch;
  for (const Column& column : loader_->dataset().columns()) {
    if (column.is_counted) continue;
    std::vector<int64_t> shape = column.shape;
    if (column.split) shape[0] = alignment_;
    shape.insert(shape.begin(), 1);
    batch.set(column.name,
              at::full(shape, column.padding, integers.dtype(scalar_type(column.type))));
  }
  const at::Tensor none = at::zeros({1}, integers.dtype(at::kDouble));
  batch.totals = {none, none};
  batch.padding = at::ones({1, alignment_}, integers.dtype(at::kBool));
  batch.place.position = at::arange(alignment_, integers);
  batch.place.sample = at::zeros({1}, integers);
  batch.cp = &alone_;
  return batch;
}

at::Tensor DynamicContextBatches::column(const Piece& piece, size_t i, int64_t length,
                                         const ProcessGroup& cp) const {
  const Column& column = piece.source->columns[i];
  std::vector<int64_t> shape = column.shape;
  const at::Tensor row =
      at::from_blob(piece.source->data().data(i, piece.row), shape, scalar_type(column.type));
  if (!column.split) return to_device(row.unsqueeze(0).clone(), device_);
  shape[0] = length;
  const at::Tensor whole = at::full(shape, column.padding, row.options());
  whole.narrow(0, 0, piece.length).copy_(row.narrow(0, piece.begin, piece.length));
  return to_device(zigzag_slice(whole.unsqueeze(0), 1, cp), device_);
}

SequenceTotals DynamicContextBatches::totals_of(const Piece& piece) const {
  const Columns& columns = piece.source->columns;
  for (size_t i = 0; i < columns.size(); ++i) {
    if (!columns[i].is_loss_weight) continue;
    const at::Tensor row = at::from_blob(piece.source->data().data(i, piece.row), columns[i].shape,
                                         scalar_type(columns[i].type));
    const SequenceTotals totals = sequence_totals(row.unsqueeze(0), row.size(0));
    return {to_device(totals.loss_weight, device_), to_device(totals.tokens, device_)};
  }
  return {};
}

Batch DynamicContextBatches::next() {
  if (own_.empty()) return empty_pass();
  MEGATRON_ASSERT(next_ < own_.size(), "a step of ", own_.size(), " passes");
  const PlacedDocument& document = own_[next_++];
  const Piece& piece = pieces_[static_cast<size_t>(document.index)];
  const auto level = static_cast<size_t>(std::countr_zero(static_cast<uint64_t>(document.width)));
  const ProcessGroup& cp = level == 0 ? alone_ : groups_.cp_widths.at(level);
  MEGATRON_ASSERT(cp.size() == document.width, "a group of ", cp.size(), " ranks for a width of ",
                  document.width);
  // With causal attention no token attends to padding at the end, and it has no weight.
  const int64_t unit = (cp.size() > 1 ? 2 : 1) * cp.size() * alignment_;
  const int64_t length = (piece.length + unit - 1) / unit * unit;
  Batch batch;
  const Columns& columns = piece.source->columns;
  for (size_t i = 0; i < columns.size(); ++i)
    if (!columns[i].is_counted) batch.set(columns[i].name, column(piece, i, length, cp));
  batch.totals = totals_of(piece);
  if (length > piece.length)
    batch.padding = to_device(
        zigzag_slice(at::arange(length, at::kLong).ge(piece.length).unsqueeze(0), 1, cp), device_);
  const std::vector<int32_t>& starts =
      piece.source->document_starts[static_cast<size_t>(piece.row)];
  const auto inside = [&](int32_t start) {
    return start > piece.begin && start < piece.begin + piece.length;
  };
  if (std::any_of(starts.begin(), starts.end(), inside)) {
    at::Tensor ids = at::zeros({1, length}, at::kLong);
    for (const int32_t start : starts)
      if (inside(start)) ids.narrow(1, start - piece.begin, length - (start - piece.begin)).add_(1);
    batch.document_ids = to_device(ids, device_);
  }
  // Positions of padding must be in the table of learned positions.
  const at::Tensor positions = zigzag_positions(length, cp.size(), cp.rank())
                                   .add(piece.begin)
                                   .clamp_max(piece.source->sequence_length() - 1);
  batch.place.position = to_device(positions, device_);
  batch.place.sample = at::full({1}, piece.source->ordinals[static_cast<size_t>(piece.row)],
                                at::dtype(at::kLong).device(device_));
  batch.cp = &cp;
  return batch;
}

}  // namespace megatron
