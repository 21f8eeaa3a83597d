#include "megatron/tensor/attention/paged_attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "megatron/base/check.h"
#include "megatron/kernels/attention/paged_append.h"
#include "megatron/kernels/attention/paged_attention.h"
#include "megatron/kernels/attention/paged_gather.h"
#include "megatron/tensor/detail/attention_cudnn.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/detail/paged_rows.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/rotary.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

template <class T>
at::Tensor on_device(const std::vector<T>& values, at::ScalarType type, at::Device device) {
  return to_device(at::tensor(values, at::dtype(type)), device);
}

// Largest finite value of E4M3.
constexpr double kLargestCode = 448.0;

}  // namespace

PagedPool pool_of(const PagedView& view, const at::Tensor& rows) {
  const at::Tensor& pool = view.pool;
  MEGATRON_ASSERT(pool.stride(3) == 1, "features of a paged cache lie apart");
  MEGATRON_ASSERT(pool.scalar_type() == (view.scale.defined() ? at::kByte : rows.scalar_type()),
                  "a cache in ", toString(pool.scalar_type()), " for rows in ",
                  toString(rows.scalar_type()));
  return {pool.const_data_ptr(), pool.stride(0), pool.stride(1), pool.stride(2),
          view.scale.defined() ? view.scale.const_data_ptr<float>() : nullptr};
}

namespace {

// The L2 cache keeps what is fetched ahead only if it is much smaller.
constexpr int64_t kMostBytesAhead = int64_t{24} << 20;

// [t, g, d] or [t, g, r, d] as the kernel reads it.
AppendedHeads heads_of(const at::Tensor& t) {
  if (!t.defined()) return {};
  MEGATRON_ASSERT(t.stride(-1) == 1 || t.size(-1) == 1, "features of a row lie apart");
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.dim() == 4 ? t.stride(2) : 0, t.size(-1)};
}

// `out`: for rotated queries. Keys, values and queries that are not there are undefined.
void append_on_gpu(const at::Tensor& out, const PagedBuffer* keys, const PagedBuffer* values,
                   const PagedRows& rows, const AddedRows& added) {
  const at::Tensor& any = added.k;
  PagedAppend args;
  args.dtype = to_dtype(any.scalar_type());
  args.rows = rows.rows();
  args.groups = any.size(1);
  args.heads_per_group = added.q.defined() ? added.q.size(2) : 0;
  args.query = heads_of(added.q);
  args.key = heads_of(added.k);
  args.value = heads_of(added.v);
  args.keys = pool_of(keys->view(), any);
  if (values != nullptr) args.values = pool_of(values->view(), any);
  const RotaryAngles& angles = added.angles;
  if (angles.cos.defined()) {
    check_shape("angles of rows", angles.cos, {rows.rows(), 1, -1});
    args.cos = angles.cos.const_data_ptr();
    args.sin = angles.sin.const_data_ptr();
    args.angle_stride = angles.cos.stride(0);
    args.half = angles.cos.size(2);
    args.interleaved = angles.interleaved;
  }
  args.slots = rows.slots.const_data_ptr<int64_t>();
  args.block_size = rows.block_size();
  if (out.defined()) args.out = out.data_ptr();
  launch(
      any, args.rows, 1, [](int64_t, int64_t) {},
      [&](void* stream) { MEGATRON_CUDA_KERNEL(paged_append_cuda(args, stream)); });
}

// Rows [t, g, d] to places of a pool [places, g, d] on a CPU.
void copy_rows(const at::Tensor& values, const at::Tensor& places, const at::Tensor& pool) {
  MEGATRON_ASSERT(values.scalar_type() == pool.scalar_type() && pool.stride(2) == 1 &&
                      values.sizes().slice(1) == pool.sizes().slice(1),
                  "values ", values.sizes(), " for places of ", pool.sizes());
  const at::Tensor from = values.stride(2) == 1 ? values : values.contiguous();
  const int64_t size = from.element_size(), groups = from.size(1), bytes = from.size(2) * size;
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(pool.data_ptr());
  const int64_t* place = places.const_data_ptr<int64_t>();
  parallel_rows(from.size(0), groups * from.size(2), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t group = 0; group < groups; ++group)
        std::memcpy(target + (place[row] * pool.stride(0) + group * pool.stride(1)) * size,
                    source + (row * from.stride(0) + group * from.stride(1)) * size,
                    static_cast<size_t>(bytes));
  });
}

// The blocks of each part, [parts, most blocks] int32.
at::Tensor table_of(std::span<const RaggedPart> parts, at::Device device) {
  size_t most = 0;
  for (const RaggedPart& part : parts) most = std::max(most, part.blocks.size());
  const at::Tensor table =
      at::zeros({static_cast<int64_t>(parts.size()), static_cast<int64_t>(most)}, at::kInt);
  int32_t* row = table.data_ptr<int32_t>();
  for (const RaggedPart& part : parts) {
    std::ranges::copy(part.blocks, row);
    row += most;
  }
  return to_device(table, device);
}

// Positions that a row reads, on average: the cost of attention is theirs.
int64_t positions_of_row(const PagedRows& rows) {
  int64_t positions = 0;
  for (int64_t i = 0; i < rows.single(); ++i)
    positions += rows.parts()[static_cast<size_t>(i)].first + 1;
  return positions / rows.single();
}

}  // namespace

PagedRows::PagedRows(std::vector<RaggedPart> parts, int64_t blocks, int64_t block_size,
                     at::Device device)
    : parts_(std::move(parts)), blocks_(blocks), block_size_(block_size) {
  std::vector<int64_t> slot, position, last_position, last_row;
  for (const RaggedPart& part : parts_) {
    const int64_t end = part.first + part.count;
    MEGATRON_ASSERT(part.count > 0 && end <= static_cast<int64_t>(part.blocks.size()) * block_size_,
                    end, " positions in ", part.blocks.size(), " blocks of ", block_size_);
    MEGATRON_ASSERT(part.count > 1 || last_row.size() == static_cast<size_t>(single_),
                    "parts of one token come first");
    if (part.count == 1) ++single_;
    for (int64_t p = part.first; p < end; ++p) {
      const int64_t block = part.blocks[static_cast<size_t>(p / block_size_)];
      MEGATRON_ASSERT(block >= 0 && block < blocks_, "block ", block, " of ", blocks_);
      slot.push_back(block * block_size_ + p % block_size_);
      position.push_back(p);
      last_position.push_back(std::max(end, part.known) - 1);
    }
    last_row.push_back(static_cast<int64_t>(slot.size()) - 1);
  }
  slots = on_device(slot, at::kLong, device);
  positions = on_device(position, at::kLong, device);
  last = on_device(last_position, at::kLong, device);
  last_rows = on_device(last_row, at::kLong, device);
  if (single_ == 0) return;
  const std::span<const RaggedPart> singles(parts_.data(), static_cast<size_t>(single_));
  std::vector<int32_t> seen;
  int64_t going_on = 0;
  for (size_t i = 0; i < singles.size(); ++i) {
    const RaggedPart& part = singles[i];
    seen.push_back(static_cast<int32_t>(part.first + 1));
    if (i + 1 == singles.size() || singles[i + 1].first != part.first + 1) continue;
    const auto own = static_cast<size_t>(part.first / block_size_);
    going_on += singles[i + 1].blocks[own] == part.blocks[own];
  }
  has_runs_ = are_runs(going_on, single_);
  block_table = table_of(singles, device);
  lengths = on_device(seen, at::kInt, device);
  sequences = at::arange(single_, at::dtype(at::kInt).device(device));
}

bool PagedRows::are_runs(int64_t going_on, int64_t rows) { return 2 * going_on >= rows; }

PagedRows::PagedRows(Numbers numbers, int64_t blocks, int64_t block_size)
    : slots(std::move(numbers.slots)),
      positions(std::move(numbers.positions)),
      last(std::move(numbers.last)),
      lengths(std::move(numbers.lengths)),
      block_table(std::move(numbers.block_table)),
      parts_(static_cast<size_t>(slots.size(0)), RaggedPart{0, 1, {}}),
      blocks_(blocks),
      block_size_(block_size),
      single_(slots.size(0)),
      has_runs_(numbers.has_runs) {
  MEGATRON_ASSERT(slots.is_cuda(), "rows whose numbers come later are those of a GPU");
  last_rows = at::arange(single_, at::dtype(at::kLong).device(slots.device()));
  sequences = at::arange(single_, at::dtype(at::kInt).device(slots.device()));
}

const PagedRows::Chunks& PagedRows::chunks(int64_t window_left) const {
  const auto [found, is_new] = chunks_.try_emplace(window_left);
  Chunks& chunks = found->second;
  if (!is_new) return chunks;
  AttentionOptions window;
  window.window_left = window_left;
  std::vector<int64_t> places;
  std::vector<int32_t> query_ends = {0}, key_ends = {0};
  for (const RaggedPart& part : parts_) {
    if (part.count == 1) continue;
    const int64_t from = first_seen(part, window), end = part.first + part.count;
    for (int64_t p = from; p < end; ++p) {
      const int64_t block = part.blocks[static_cast<size_t>(p / block_size_)];
      MEGATRON_ASSERT(block >= 0, "position ", p, " is in no block");
      places.push_back(block * block_size_ + p % block_size_);
    }
    query_ends.push_back(query_ends.back() + static_cast<int32_t>(part.count));
    key_ends.push_back(key_ends.back() + static_cast<int32_t>(end - from));
    chunks.most_queries = std::max(chunks.most_queries, part.count);
    chunks.most_keys = std::max(chunks.most_keys, end - from);
  }
  const at::Device device = slots.device();
  chunks.places = on_device(places, at::kLong, device);
  chunks.query_ends = on_device(query_ends, at::kInt, device);
  chunks.key_ends = on_device(key_ends, at::kInt, device);
  if (window_left < 0) add_samples(chunks, query_ends, key_ends);
  return chunks;
}

void PagedRows::add_samples(Chunks& chunks, const std::vector<int32_t>& query_ends,
                            const std::vector<int32_t>& key_ends) const {
  // cuDNN's kernels are faster there than libtorch's flash attention, and plans take tenths of a
  // second to make: not for few rows or short texts.
  constexpr int64_t kLeastRows = 1024, kLeastOfPrompt = 512;
  const auto begins = [](const RaggedPart& part) { return part.first == 0 && part.ends.empty(); };
  const std::span<const RaggedPart> several(parts_.begin() + single_, parts_.end());
  size_t going_on = several.size();
  while (going_on > 0 && begins(several[going_on - 1])) --going_on;
  if (query_ends.back() - query_ends[going_on] < kLeastRows) return;
  const size_t whole = several.size() - going_on, samples = std::bit_ceil(whole);
  std::vector<int32_t> counts(samples, 0), offsets(samples + 1, query_ends.back());
  for (size_t i = 0; i < whole; ++i) {
    offsets[i] = query_ends[going_on + i];
    counts[i] = query_ends[going_on + i + 1] - offsets[i];
  }
  const int64_t most = rows_of_choice(*std::ranges::max_element(counts));
  if (most < kLeastOfPrompt) return;
  for (int32_t& offset : offsets) offset -= query_ends[going_on];
  const at::Device device = slots.device();
  chunks.sample_offsets = on_device(offsets, at::kInt, device);
  chunks.sample_counts = on_device(counts, at::kInt, device);
  chunks.most_of_sample = most;
  chunks.parts_going_on = static_cast<int64_t>(going_on);
  chunks.rows_going_on = query_ends[going_on];
  chunks.keys_going_on = key_ends[going_on];
}

const PagedRows::Spans& PagedRows::spans(int64_t most) const {
  const auto [found, is_new] = spans_.try_emplace(most);
  if (!is_new) return found->second;
  const std::span<const RaggedPart> several(parts_.begin() + single_, parts_.end());
  std::vector<std::array<int32_t, 4>> spans;
  int64_t first = single_;
  for (size_t i = 0; i < several.size(); ++i) {
    const RaggedPart& part = several[i];
    MEGATRON_CHECK(part.ends.empty(),
                   "--batch-invariant-mode on GPUs knows no rows that see later ones");
    for (int64_t done = 0; done < part.count; done += most)
      spans.push_back({static_cast<int32_t>(i), static_cast<int32_t>(first + done),
                       static_cast<int32_t>(std::min(most, part.count - done)),
                       static_cast<int32_t>(part.first + done)});
    first += part.count;
  }
  // Those that see most begin first.
  std::ranges::stable_sort(spans, std::ranges::greater{},
                           [](const std::array<int32_t, 4>& span) { return span[2] + span[3]; });
  std::vector<int32_t> numbers;
  for (const auto& span : spans) numbers.insert(numbers.end(), span.begin(), span.end());
  found->second = {table_of(several, slots.device()),
                   on_device(numbers, at::kInt, slots.device()).view({-1, 4})};
  return found->second;
}

void PagedBuffer::hold(const PagedRows& rows, const at::Tensor& values) {
  check_shape("values for a paged cache", values, {rows.rows(), -1, -1});
  type_ = values.scalar_type();
  if (measuring_) {
    const at::Tensor largest = values.abs().amax(at::IntArrayRef{0, 2}).to(at::kFloat);
    amax_ = amax_.defined() ? at::maximum(amax_, largest) : largest;
  }
  reserve(rows.pool_blocks(), {rows.block_size(), values.size(1), values.size(2)},
          scale_.defined() ? values.options().dtype(at::kByte) : values.options());
}

void PagedBuffer::write(const PagedRows& rows, const at::Tensor& values) {
  hold(rows, values);
  if (values.is_cuda()) {
    append_on_gpu({}, this, nullptr, rows, {{}, values, {}});
    return;
  }
  at::Tensor kept = values;
  if (scale_.defined())
    kept = (values.to(accumulate_type(values)) / scale_.unsqueeze(1))
               .clamp(-kLargestCode, kLargestCode)
               .to(at::kFloat8_e4m3fn)
               .view(at::kByte);
  copy_rows(kept, rows.slots, data_.flatten(0, 1));
}

at::Tensor PagedBuffer::gather(const PagedRows& rows, const RaggedPart& part, int64_t from) const {
  const int64_t size = rows.block_size(), end = part.first + part.count;
  const int64_t first_block = from / size, last_block = (end - 1) / size;
  const std::vector<int32_t> blocks(part.blocks.begin() + first_block,
                                    part.blocks.begin() + last_block + 1);
  MEGATRON_ASSERT(blocks.front() >= 0, "position ", from, " is in no block");
  return values_of(data_.index_select(0, on_device(blocks, at::kInt, data_.device()))
                       .flatten(0, 1)
                       .narrow(0, from - first_block * size, end - from));
}

at::Tensor PagedBuffer::values_of(const at::Tensor& found) const {
  if (!scale_.defined()) return found;
  return (found.view(at::kFloat8_e4m3fn).to(at::kFloat) * scale_.unsqueeze(1)).to(type_);
}

void PagedBuffer::measure() { measuring_ = true; }

void PagedBuffer::quantize(double room) {
  MEGATRON_ASSERT(amax_.defined(), "nothing was measured");
  clear();
  // A head whose values were all zero keeps what it can.
  scale_ = at::where(amax_ > 0, amax_ * (room / kLargestCode), at::ones_like(amax_));
  amax_.reset();
  measuring_ = false;
}

at::Tensor append_rows(PagedBuffer& keys, PagedBuffer& values, const PagedRows& rows,
                       const AddedRows& added) {
  const at::Tensor &q = added.q, &k = added.k;
  const int64_t t = rows.rows(), n = q.size(1) * q.size(2), d = q.size(3);
  const RotaryAngles& angles = added.angles;
  if (q.is_cuda() && !keys.is_measuring()) {
    keys.hold(rows, k);
    values.hold(rows, added.v);
    const at::Tensor out = at::empty({t, 1, n, d}, q.options());
    append_on_gpu(out, &keys, &values, rows, added);
    return out;
  }
  at::Tensor queries = q.reshape({t, 1, n, d}), rotated = k.unsqueeze(1);
  if (angles.cos.defined()) {
    queries = apply_rotary(queries, angles.cos, angles.sin, angles.interleaved);
    rotated = apply_rotary(rotated, angles.cos, angles.sin, angles.interleaved);
  }
  keys.write(rows, rotated.squeeze(1));
  values.write(rows, added.v);
  return queries;
}

int64_t first_seen(const RaggedPart& part, const AttentionOptions& options) {
  return options.window_left < 0 ? 0 : std::max<int64_t>(0, part.first - options.window_left);
}

at::Tensor attend_rows(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                       const PagedTables& tables, const AttentionOptions& options,
                       const at::Tensor& lse) {
  MEGATRON_ASSERT(q.is_cpu() || (!lse.defined() && !tables.starts.defined()),
                  "starts of rows and their log sum exp are known on the CPU alone");
  const at::Tensor query = q.contiguous();
  at::Tensor out = at::empty({q.size(0), q.size(1), values.pool.size(3)}, q.options());
  PagedAttention args;
  args.dtype = to_dtype(q.scalar_type());
  args.rows = q.size(0);
  args.heads = q.size(1);
  args.groups = keys.pool.size(2);
  args.key_size = keys.pool.size(3);
  args.value_size = values.pool.size(3);
  args.scale = options.scale;
  args.softcap = options.softcap;
  args.window_left = options.window_left;
  const at::Tensor sinks =
      options.sinks.defined() ? options.sinks.to(accumulate_type(q)).contiguous() : at::Tensor();
  if (sinks.defined()) {
    check_shape("sinks", sinks, {q.size(1)});
    args.sinks = sinks.const_data_ptr();
  }
  args.query = query.const_data_ptr();
  args.keys = pool_of(keys, q);
  args.values = pool_of(values, q);
  args.block_size = tables.block_size;
  if (args.rows == 0) return out;
  args.sequences = tables.sequences.const_data_ptr<int32_t>();
  args.lengths = tables.lengths.const_data_ptr<int32_t>();
  args.block_table = tables.block_table.const_data_ptr<int32_t>();
  args.table_stride = tables.block_table.size(1);
  args.out = out.data_ptr();
  args.has_runs = tables.has_runs;
  if (tables.starts.defined()) args.starts = tables.starts.const_data_ptr<int32_t>();
  if (lse.defined()) args.lse = lse.data_ptr();
  if (const auto bytes = tables.ahead.defined() ? static_cast<int64_t>(tables.ahead.nbytes()) : 0;
      args.rows == 1 && bytes > 0 && bytes <= kMostBytesAhead) {
    args.ahead = tables.ahead.const_data_ptr();
    args.ahead_bytes = bytes;
  }
  const int64_t work =
      tables.positions * (args.key_size + args.value_size) * args.heads / args.groups;
  const auto on_cpu = [&](int64_t begin, int64_t end) { paged_attention_cpu(args, begin, end); };
  constexpr int64_t kCpuCost = 4;  // of a product here, next to one of a matrix
  if (q.is_cpu())
    parallel_rows(args.rows * args.groups, kCpuCost * work, on_cpu);
  else
    launch(q, args.rows * args.groups, work, on_cpu,
           [&](void* stream) { MEGATRON_CUDA_KERNEL(paged_attention_cuda(args, stream)); });
  return out;
}

at::Tensor paged_attention(const at::Tensor& q, const PagedView& keys, const PagedView& values,
                           const PagedRows& rows, const AttentionOptions& options,
                           const at::Tensor& ahead) {
  MEGATRON_ASSERT(options.causal && options.dropout == 0.0 && !options.mask.defined(),
                  "paged attention knows no dropout and no mask but the causal one");
  check_shape("queries", q, {rows.single(), -1, keys.pool.size(3)});
  return attend_rows(q, keys, values,
                     {rows.sequences,
                      rows.lengths,
                      rows.block_table,
                      rows.block_size(),
                      rows.single() > 0 ? positions_of_row(rows) : 0,
                      {},
                      ahead,
                      rows.has_runs()},
                     options);
}

namespace {

// Keys [places, g, d] and values [places, g, v] at some places of a cache on a GPU, in the type of
// `like`: copies.
std::pair<at::Tensor, at::Tensor> gathered(const PagedBuffer& keys, const PagedBuffer& values,
                                           const PagedRows& rows, const at::Tensor& places,
                                           const at::Tensor& like) {
  const PagedView k = keys.view(), v = values.view();
  const int64_t count = places.size(0), groups = k.pool.size(2);
  at::Tensor out_keys = at::empty({count, groups, k.pool.size(3)}, like.options()),
             out_values = at::empty({count, groups, v.pool.size(3)}, like.options());
  PagedGather args;
  args.dtype = to_dtype(like.scalar_type());
  args.rows = count;
  args.groups = groups;
  args.key_size = k.pool.size(3);
  args.value_size = v.pool.size(3);
  args.keys = pool_of(k, like);
  args.values = pool_of(v, like);
  args.block_size = rows.block_size();
  args.places = places.const_data_ptr<int64_t>();
  args.out_keys = out_keys.data_ptr();
  args.out_values = out_values.data_ptr();
  launch(
      like, count, 1, [](int64_t, int64_t) {},
      [&](void* stream) { MEGATRON_CUDA_KERNEL(paged_gather_cuda(args, stream)); });
  return {std::move(out_keys), std::move(out_values)};
}

// Of the samples of `chunks` by cuDNN, other rows undefined; nothing: there are none, or it cannot.
std::optional<at::Tensor> attend_samples(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const PagedRows::Chunks& chunks,
                                         const AttentionOptions& options) {
  if (!chunks.sample_counts.defined() || options.backend == AttentionBackend::kFlash)
    return std::nullopt;
  const RowRanges ranges{chunks.sample_offsets, chunks.sample_counts, chunks.most_of_sample};
  const auto behind = [](const at::Tensor& t, int64_t first) {
    return t.narrow(0, first, t.size(0) - first);
  };
  at::Tensor out = at::empty_like(q);
  const at::Tensor queries = behind(q, chunks.rows_going_on),
                   keys = behind(k, chunks.keys_going_on), values = behind(v, chunks.keys_going_on),
                   to = behind(out, chunks.rows_going_on);
  if (!cudnn_has_ranges_forward(queries, keys, values, to, {ranges, ranges}, options))
    return std::nullopt;
  cudnn_ranges_forward(queries, keys, values, to, {ranges, ranges}, options);
  return out;
}

}  // namespace

std::optional<at::Tensor> attend_chunks(const at::Tensor& q, const PagedBuffer& keys,
                                        const PagedBuffer& values, const PagedRows& rows,
                                        const AttentionOptions& options) {
  const int64_t d = q.size(2);
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  const bool by_library = options.backend == AttentionBackend::kAuto ||
                          options.backend == AttentionBackend::kFlash ||
                          options.backend == AttentionBackend::kFused;
  if (!q.is_cuda() || !half || !by_library || d % 8 != 0 || d > 256 ||
      values.view().pool.size(3) != d || options.softcap > 0.0 || options.sinks.defined() ||
      options.distance_bias.defined() || options.mask.defined() || !options.causal ||
      std::ranges::any_of(rows.parts(), [](const RaggedPart& part) { return !part.ends.empty(); }))
    return std::nullopt;
  const PagedRows::Chunks& chunks = rows.chunks(options.window_left);
  const at::Tensor queries = q.contiguous();
  const auto [k, v] = gathered(keys, values, rows, chunks.places, q);
  // Its causal mask lets the last query of a part see the last of its keys.
  const std::optional<int64_t> left =
      options.window_left < 0 ? std::nullopt : std::optional(options.window_left);
  const auto flash = [&, &k = k, &v = v](int64_t parts, int64_t of_queries, int64_t of_keys) {
    return std::get<0>(at::_flash_attention_forward(
        queries.narrow(0, 0, of_queries), k.narrow(0, 0, of_keys), v.narrow(0, 0, of_keys),
        chunks.query_ends.narrow(0, 0, parts + 1), chunks.key_ends.narrow(0, 0, parts + 1),
        chunks.most_queries, chunks.most_keys, /*dropout_p=*/0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, options.scale, left,
        left ? std::optional<int64_t>(0) : std::nullopt));
  };
  std::optional<at::Tensor> out = attend_samples(queries, k, v, chunks, options);
  if (!out) return flash(chunks.query_ends.size(0) - 1, queries.size(0), k.size(0));
  if (chunks.parts_going_on > 0)
    out->narrow(0, 0, chunks.rows_going_on)
        .copy_(flash(chunks.parts_going_on, chunks.rows_going_on, chunks.keys_going_on));
  return out;
}

at::Tensor attend_parts(
    const PagedRows& rows, const at::Tensor& q,
    const std::function<at::Tensor(const at::Tensor& q)>& single,
    const std::function<at::Tensor(const RaggedPart& part, const at::Tensor& q)>& several) {
  check_shape("queries of a ragged batch", q, {rows.rows(), 1, -1, -1});
  std::vector<at::Tensor> outs;
  int64_t done = rows.single();
  if (done > 0) outs.push_back(single(q.narrow(0, 0, done).squeeze(1)).unsqueeze(1));
  for (const RaggedPart& part : rows.parts()) {
    if (part.count == 1) continue;
    outs.push_back(several(part, q.narrow(0, done, part.count)));
    done += part.count;
  }
  return outs.size() == 1 ? outs.front() : at::cat(outs);
}

}  // namespace megatron
