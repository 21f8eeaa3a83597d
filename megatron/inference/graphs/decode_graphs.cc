#include "megatron/inference/graphs/decode_graphs.h"

#include <algorithm>
#include <ranges>

#include "megatron/base/check.h"
#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

enum Wide : int64_t { kIds, kFrom, kSlots, kPositions, kLast, kWideKinds };

// Those of a kind, of a graph of `size` rows.
at::Tensor wide_numbers(const at::Tensor& numbers, Wide kind, int64_t size) {
  return numbers.narrow(0, kind * size, size);
}
at::Tensor narrow_numbers(const at::Tensor& numbers, int64_t size, int64_t count) {
  return numbers.view(at::kInt).narrow(0, 2 * kWideKinds * size, count);
}
// As int64.
int64_t all_numbers(int64_t size, int64_t narrow) { return kWideKinds * size + (narrow + 1) / 2; }

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
  numbers_ = at::zeros({all_numbers(sizes_.back(), table_numbers(sizes_.back()))},
                       last_sampled_.options().dtype(at::kLong));
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
  const auto wide = [&](Wide wanted) { return wide_numbers(numbers_, wanted, size); };
  const at::Tensor narrow = narrow_numbers(numbers_, size, table_numbers(size));
  PagedRows::Numbers numbers{
      wide(kSlots),
      wide(kPositions),
      wide(kLast),
      narrow.narrow(0, 0, size),
      narrow.narrow(0, size, size * pool_.most_blocks).view({size, pool_.most_blocks}),
      kind.has_runs};
  std::vector<int64_t> slots(static_cast<size_t>(size));
  return {PagedRows(std::move(numbers), pool_.blocks, pool_.block_size), std::move(slots),
          pool_.slots};
}

at::Tensor DecodeGraphs::tokens_of(int64_t size) const {
  const at::Tensor from = wide_numbers(numbers_, kFrom, size);
  const at::Tensor drawn = last_sampled_.index_select(0, from.clamp_min(0));
  return at::where(from.ge(0), drawn, wide_numbers(numbers_, kIds, size)).unsqueeze(0);
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
  const at::Tensor all =
      at::zeros({all_numbers(size, table_numbers(size))}, at::dtype(at::kLong).pinned_memory(true));
  const auto of = [&](Wide kind) { return all.mutable_data_ptr<int64_t>() + kind * size; };
  auto* const lengths = reinterpret_cast<int32_t*>(of(kWideKinds));
  int32_t* const tables = lengths + size;
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
  numbers_.narrow(0, 0, all.size(0)).copy_(all, /*non_blocking=*/true);
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
