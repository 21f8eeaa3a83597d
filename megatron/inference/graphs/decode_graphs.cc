#include "megatron/inference/graphs/decode_graphs.h"

#include <algorithm>
#include <ranges>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

enum WideRow : int64_t { kIds, kFrom, kSlots, kPositions, kLast, kWideRows };

// From a number of rows with a graph to the next one.
int64_t distance_behind(int64_t rows) {
  return rows < 8 ? rows : rows < 64 ? 8 : rows < 128 ? 16 : rows < 256 ? 32 : 64;
}

// Fewer rows share nothing worth a graph.
constexpr int64_t kLeastRuns = 8;

// Attention of batch-invariant mode does not ask which rows are of one text.
bool has_graph_of_runs(int64_t size) { return size >= kLeastRuns && !is_batch_invariant(); }

}  // namespace

std::vector<int64_t> graph_sizes(int64_t count, int64_t most) {
  std::vector<int64_t> sizes;
  if (count == 0 || most < 1) return sizes;
  if (count < 0) {
    for (int64_t rows = 1; rows < most; rows += distance_behind(rows)) sizes.push_back(rows);
    sizes.push_back(most);
    return sizes;
  }
  count = std::min(count, most);
  for (int64_t i = 1; i <= count; ++i) sizes.push_back((most * i + count - 1) / count);
  return sizes;
}

DecodeGraphs::DecodeGraphs(std::vector<int64_t> sizes, const Pool& pool, at::Tensor last_sampled,
                           Forward forward)
    : sizes_(std::move(sizes)),
      kinds_([this] {
        std::vector<Kind> kinds;
        for (const int64_t size : sizes_) {
          kinds.push_back({size, false});
          if (has_graph_of_runs(size)) kinds.push_back({size, true});
        }
        return kinds;
      }()),
      pool_(pool),
      last_sampled_(std::move(last_sampled)),
      forward_(std::move(forward)) {
  MEGATRON_ASSERT(!sizes_.empty() && std::ranges::is_sorted(sizes_), "graphs of no size");
  const at::TensorOptions here = last_sampled_.options();
  wide_ = at::zeros({kWideRows, sizes_.back()}, here.dtype(at::kLong));
  narrow_ = at::zeros({sizes_.back() * (1 + pool_.most_blocks)}, here.dtype(at::kInt));
}

bool DecodeGraphs::fits(std::span<const Row> rows) const {
  return !rows.empty() && static_cast<int64_t>(rows.size()) <= sizes_.back() &&
         std::ranges::all_of(rows, [&](const Row& row) {
           return static_cast<int64_t>(row.blocks.size()) <= pool_.most_blocks;
         });
}

void DecodeGraphs::clear() {
  captured_.clear();
  memory_.reset();
}

// A graph of `size` rows reads the leading numbers of each kind: their places are the same for all
// steps of that size.
RaggedBatch DecodeGraphs::batch_of(const Kind& kind) const {
  const int64_t size = kind.size;
  const auto wide = [&](int64_t row) { return wide_[row].narrow(0, 0, size); };
  PagedRows::Numbers numbers{
      wide(kSlots),
      wide(kPositions),
      wide(kLast),
      narrow_.narrow(0, 0, size),
      narrow_.narrow(0, size, size * pool_.most_blocks).view({size, pool_.most_blocks}),
      kind.has_runs};
  std::vector<int64_t> slots(static_cast<size_t>(size));
  return {PagedRows(std::move(numbers), pool_.blocks, pool_.block_size), std::move(slots),
          pool_.slots};
}

at::Tensor DecodeGraphs::tokens_of(int64_t size) const {
  const at::Tensor from = wide_[kFrom].narrow(0, 0, size);
  const at::Tensor drawn = last_sampled_.index_select(0, from.clamp_min(0));
  return at::where(from.ge(0), drawn, wide_[kIds].narrow(0, 0, size)).unsqueeze(0);
}

DecodeGraphs::Captured DecodeGraphs::capture(const Kind& kind) {
  if (!memory_) memory_ = std::make_unique<DeviceGraphPool>(last_sampled_.device());
  const int64_t size = kind.size;
  RaggedBatch batch = batch_of(kind);
  // With rows that do nothing: libraries choose their kernels and make their workspaces.
  write({}, size);
  forward_(tokens_of(size), batch);
  at::Tensor result;
  DeviceGraph graph(*memory_, [&] { result = forward_(tokens_of(size), batch); });
  return {std::move(batch), std::move(result), std::move(graph)};
}

void DecodeGraphs::write(std::span<const Row> rows, int64_t size) {
  const auto pinned = [](at::IntArrayRef shape, at::ScalarType type) {
    return at::zeros(shape, at::TensorOptions().dtype(type).pinned_memory(true));
  };
  at::Tensor wide = pinned({kWideRows, size}, at::kLong);
  at::Tensor narrow = pinned({size * (1 + pool_.most_blocks)}, at::kInt);
  const auto of = [&](WideRow kind) { return wide.data_ptr<int64_t>() + kind * size; };
  int32_t *lengths = narrow.data_ptr<int32_t>(), *tables = lengths + size;
  std::fill_n(of(kFrom), size, -1);
  std::fill_n(of(kSlots), size, -1);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const int64_t block = row.blocks[static_cast<size_t>(row.position / pool_.block_size)];
    MEGATRON_ASSERT(block >= 0 && block < pool_.blocks, "block ", block, " of ", pool_.blocks);
    of(kIds)[i] = std::max(row.token, 0);
    if (row.token < 0) of(kFrom)[i] = row.slot;
    of(kSlots)[i] = block * pool_.block_size + row.position % pool_.block_size;
    of(kPositions)[i] = row.position;
    of(kLast)[i] = std::max(row.position + 1, row.known) - 1;
    lengths[i] = static_cast<int32_t>(row.position + 1);
    std::ranges::copy(row.blocks, tables + static_cast<int64_t>(i) * pool_.most_blocks);
  }
  wide_.narrow(1, 0, size).copy_(wide, /*non_blocking=*/true);
  narrow_.narrow(0, 0, narrow.size(0)).copy_(narrow, /*non_blocking=*/true);
}

DecodeGraphs::Kind DecodeGraphs::kind_of(std::span<const Row> rows) const {
  const auto count = static_cast<int64_t>(rows.size());
  int64_t going_on = 0;
  for (size_t i = 1; i < rows.size(); ++i)
    going_on += rows[i].slot == rows[i - 1].slot && rows[i].position == rows[i - 1].position + 1;
  const int64_t size = *std::ranges::lower_bound(sizes_, count);
  return {size, PagedRows::are_runs(going_on, count) && has_graph_of_runs(size)};
}

DecodeGraphs::Result DecodeGraphs::run(std::span<const Row> rows) {
  const Kind kind = kind_of(rows);
  auto found = captured_.find(kind);
  if (found == captured_.end()) found = captured_.emplace(kind, capture(kind)).first;
  write(rows, kind.size);
  found->second.graph.launch();
  return {found->second.result.narrow(0, 0, static_cast<int64_t>(rows.size())), kind.size};
}

void DecodeGraphs::capture_next() {
  for (const Kind& kind : kinds_ | std::views::reverse) {
    if (captured_.contains(kind)) continue;
    captured_.emplace(kind, capture(kind));
    return;
  }
}

}  // namespace megatron
