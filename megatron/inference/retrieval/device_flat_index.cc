#include "megatron/inference/retrieval/device_flat_index.h"

#include <algorithm>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/inference/retrieval/flat_index.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kQueriesAtOnce = 8192, kColumns = 65536;  // of one product, 1 GiB of bf16
constexpr int64_t kRowsAtOnce = 16384;                      // that are rounded
// Bounds are computed in fp32, of centred vectors that were rounded to fp32: this share of
// |x|^2 + |q|^2 is more than they are off. For an x whose |x - q|^2 - |q|^2 is at most a limit t,
// |x|^2 is at most 4 |q|^2 + 2 |t|.
constexpr double kSlack = 0x1p-19;
constexpr double kProductRounding = 0x1p-8 * 1.01;  // 2 u of a product in bf16

// Rows less the centre: rounded to bf16; squared lengths, lengths and those of what was lost, fp64.
struct Rounded {
  Rounded(const at::Tensor& rows, const at::Tensor& centre) {
    const at::Tensor centred = rows - centre;
    values = centred.to(at::kBFloat16);
    const at::Tensor exact = centred.to(at::kDouble);
    squares = exact.square().sum(1);
    lengths = squares.sqrt();
    lost = (exact - values.to(at::kDouble)).square().sum(1).sqrt();
  }
  at::Tensor values, squares, lengths, lost;
};

// |sum of n products in fp32 - the sum| <= this times the vectors' lengths; units may be truncated.
double sum_rounding(int64_t width) { return static_cast<double>(width + 1) * 0x1p-23; }

at::Tensor fp32_above(const at::Tensor& x) { return (x * (1 + 0x1p-20)).to(at::kFloat); }

struct TileNearest {
  at::Tensor distances, ids;
};

// The k nearest of each row [n, m] in order, ties to the lower id.
TileNearest nearest_of(TileNearest all, int64_t k) {
  if (all.distances.size(1) > k) {
    const auto [nearest, places] = all.distances.topk(k, 1, /*largest=*/false, /*sorted=*/false);
    const at::Tensor inside = all.distances.le(nearest.amax(1, /*keepdim=*/true)).sum(1);
    // Else some that are as far as the k-th are beyond it, and ids decide which.
    if (inside.eq(k).all().item<bool>()) all = {nearest, all.ids.gather(1, places)};
  }
  at::Tensor order;
  std::tie(all.ids, order) = all.ids.sort(/*stable=*/true, 1, /*descending=*/false);
  all.distances = all.distances.gather(1, order);
  std::tie(all.distances, order) = all.distances.sort(/*stable=*/true, 1, /*descending=*/false);
  return {all.distances.narrow(1, 0, k).contiguous(), all.ids.gather(1, order.narrow(1, 0, k))};
}

// Of a tile of queries, in one part of the vectors.
class TileSearch {
 public:
  TileSearch(const DeviceVectors& vectors, const at::Tensor& queries, int64_t first_id, int64_t k,
             int64_t capacity)
      : vectors_(vectors),
        queries_(queries),
        first_id_(first_id),
        k_(k),
        candidates_(queries.size(0), std::max(capacity, k), queries.device()) {
    const Rounded rounded(queries, vectors.centre);
    rounded_ = rounded.values;
    squares_ = rounded.squares;
    bounds_.norms = fp32_above(2 * rounded.lengths);
    bounds_.errors = fp32_above(2 * rounded.lost);
  }

  // `distances` and `ids` [queries, k] of what was found before.
  void run(at::Tensor distances, at::Tensor ids) {
    distances_ = std::move(distances);
    ids_ = std::move(ids);
    bounds_.limits = limits_of(distances_.select(1, k_ - 1) - squares_);
    int64_t rows = candidates_.capacity(), tightened = 0;
    for (int64_t first = 0; first < vectors_.size();) {
      rows = std::min(rows, vectors_.size() - first);
      const at::Tensor before = candidates_.counts.clone();
      scan(first, rows);
      const int64_t most = candidates_.most();
      if (most > candidates_.capacity()) {  // some rows were lost
        candidates_.counts.copy_(before);
        make_room();
        rows = std::max<int64_t>(1, rows / 2);
        continue;
      }
      first += rows;
      if (first >= 2 * tightened || 2 * most > candidates_.capacity()) {
        tighten(most);
        tightened = first;
      }
      rows = std::min({2 * rows, std::max(first, candidates_.capacity()), kColumns});
    }
    tighten(candidates_.most());
    measure();
  }
  const at::Tensor& distances() const { return distances_; }
  const at::Tensor& ids() const { return ids_; }

 private:
  at::Tensor limits_of(const at::Tensor& values) const {
    return (values + 2 * kSlack * (5 * squares_ + 2 * values.abs()))
        .to(at::kFloat)
        .nan_to_num_(kInfinity, kInfinity, -kInfinity)
        .contiguous();
  }

  void scan(int64_t first, int64_t rows) {
    at::Tensor products = at::empty({queries_.size(0), rows}, rounded_.options());
    linear_forward_into(rounded_, vectors_.rounded.narrow(0, first, rows), {}, products);
    const VectorBounds& all = vectors_.bounds;
    scan_candidates(products, first, bounds_,
                    {all.squares.narrow(0, first, rows), all.errors.narrow(0, first, rows),
                     all.norms.narrow(0, first, rows)},
                    kProductRounding, candidates_);
  }

  // Lowers the limits to the k-th smallest upper bounds, and leaves what is above them out. `most`:
  // candidates of a query.
  void tighten(int64_t most) {
    if (most < k_) return;
    const at::Tensor kth =
        std::get<0>(
            candidates_.upper.narrow(1, 0, most).topk(k_, 1, /*largest=*/false, /*sorted=*/false))
            .amax(1);
    bounds_.limits = at::minimum(bounds_.limits, limits_of(kth.to(at::kDouble)));
    candidates_ = filter_candidates(candidates_, bounds_.limits);
  }

  // So that at most half of the places are taken.
  void make_room() {
    // Upper bounds behind the counts are of rows that were scanned in vain.
    const at::Tensor place =
        at::arange(candidates_.capacity(), candidates_.counts.options()).unsqueeze(0);
    candidates_.upper.masked_fill_(place >= candidates_.counts.unsqueeze(1), kInfinity);
    tighten(candidates_.capacity());
    if (2 * candidates_.most() > candidates_.capacity()) measure();
  }

  // Distances of all candidates; the k nearest stay, in order, and no candidate.
  void measure() {
    const int64_t most = candidates_.most();
    if (most == 0) return;
    at::Tensor distances =
        candidate_distances(candidates_, queries_, vectors_.vectors).narrow(1, 0, most);
    at::Tensor ids = candidates_.rows.narrow(1, 0, most).to(at::kLong) + first_id_;
    ids.masked_fill_(distances == kInfinity, -1);
    const TileNearest found =
        nearest_of({at::cat({distances_, distances}, 1), at::cat({ids_, ids}, 1)}, k_);
    distances_ = found.distances;
    ids_ = found.ids;
    bounds_.limits =
        at::minimum(bounds_.limits, limits_of(distances_.select(1, k_ - 1) - squares_));
    candidates_ =
        CandidateLists(queries_.size(0), candidates_.capacity(), candidates_.counts.device());
  }

  const DeviceVectors& vectors_;
  const at::Tensor queries_;
  const int64_t first_id_, k_;
  CandidateLists candidates_;
  at::Tensor rounded_, squares_;  // squares_: |q|^2, fp64
  QueryBounds bounds_;
  at::Tensor distances_, ids_;
};

}  // namespace

DeviceVectors::DeviceVectors(int64_t rows, int64_t width, c10::Device device) {
  const at::TensorOptions fp32 = at::TensorOptions().dtype(at::kFloat).device(device);
  vectors = at::empty({rows, width}, fp32);
  rounded = at::empty({rows, width}, fp32.dtype(at::kBFloat16));
  bounds = {at::empty({rows}, fp32), at::empty({rows}, fp32), at::empty({rows}, fp32)};
}

int64_t DeviceVectors::bytes_of_row(int64_t width) { return (4 + 2) * width + 3 * 4; }

void DeviceVectors::set(int64_t first, const at::Tensor& rows) {
  vectors.narrow(0, first, rows.size(0)).copy_(rows);
  if (!centre.defined()) centre = vectors.narrow(0, first, rows.size(0)).mean(0);
  for (int64_t at = 0; at < rows.size(0); at += kRowsAtOnce) {
    const int64_t n = std::min(kRowsAtOnce, rows.size(0) - at), begin = first + at;
    const Rounded part(vectors.narrow(0, begin, n), centre);
    rounded.narrow(0, begin, n).copy_(part.values);
    bounds.squares.narrow(0, begin, n).copy_(part.squares);
    bounds.errors.narrow(0, begin, n)
        .copy_(fp32_above(part.lost + sum_rounding(width()) * part.lengths));
    bounds.norms.narrow(0, begin, n).copy_(fp32_above(part.lengths + part.lost));
  }
}

NearestVectors::NearestVectors(int64_t queries, int64_t k, c10::Device device)
    : distances(at::full({queries, k}, kInfinity, at::dtype(at::kDouble).device(device))),
      ids(at::full({queries, k}, -1, at::dtype(at::kLong).device(device))) {}

void search_device_vectors(const DeviceVectors& vectors, const at::Tensor& queries,
                           int64_t first_id, NearestVectors& nearest, int64_t capacity) {
  const at::NoGradGuard no_grad;
  const int64_t count = queries.size(0), k = nearest.ids.size(1);
  for (int64_t q = 0; q < count; q += kQueriesAtOnce) {
    const int64_t n = std::min(kQueriesAtOnce, count - q);
    TileSearch search(vectors, queries.narrow(0, q, n), first_id, k, capacity);
    at::Tensor distances = nearest.distances.narrow(0, q, n), ids = nearest.ids.narrow(0, q, n);
    search.run(distances, ids);
    distances.copy_(search.distances());
    ids.copy_(search.ids());
  }
}

DeviceFlatIndex::DeviceFlatIndex(BlockFiles vectors, c10::Device device, int64_t bytes)
    : files_(std::move(vectors)), device_(device) {
  const BlockShape& shape = files_.shape();
  const int64_t block =
      std::min(shape.block_rows, shape.rows) * DeviceVectors::bytes_of_row(shape.width);
  MEGATRON_CHECK(block <= bytes, "a block of vectors needs ",
                 format_bytes(static_cast<double>(block)), " on ", device_.str(), ", which has ",
                 format_bytes(static_cast<double>(bytes)), " for vectors",
                 "\nhint: a smaller --retro-block-size, or --device cpu");
  blocks_at_once_ = std::min(bytes / block, files_.num_blocks());
}

std::shared_ptr<const DeviceVectors> DeviceFlatIndex::load(int64_t first, int64_t end) const {
  const int64_t begin = files_.block(first).begin;
  auto part = std::make_shared<DeviceVectors>(files_.block(end - 1).end - begin, width(), device_);
  for (int64_t i = first; i < end; ++i) {
    const RowBlock block = files_.block(i);
    std::vector<float> rows = read_chunk_vectors(files_, block);
    part->set(block.begin - begin, at::from_blob(rows.data(), {block.size(), width()}, at::kFloat));
  }
  return part;
}

std::vector<int64_t> DeviceFlatIndex::search(std::span<const float> queries, int64_t k) const {
  MEGATRON_ASSERT(k > 0 && std::ssize(queries) % width() == 0);
  const int64_t count = std::ssize(queries) / width();
  const at::Tensor asked =
      at::from_blob(const_cast<float*>(queries.data()), {count, width()}, at::kFloat)
          .to(device_, /*non_blocking=*/false, /*copy=*/true);
  NearestVectors nearest(count, k, device_);
  for (int64_t i = 0; i < files_.num_blocks(); i += blocks_at_once_) {
    std::shared_ptr<const DeviceVectors> part = all_;
    if (part == nullptr) part = load(i, std::min(i + blocks_at_once_, files_.num_blocks()));
    if (blocks_at_once_ == files_.num_blocks()) all_ = part;
    search_device_vectors(*part, asked, files_.block(i).begin, nearest);
  }
  const at::Tensor ids = nearest.ids.to(at::kCPU).contiguous();
  const int64_t* data = ids.const_data_ptr<int64_t>();
  return {data, data + ids.numel()};
}

std::unique_ptr<VectorIndex> open_flat_index(BlockFiles vectors, c10::Device device) {
  if (!device.is_cuda()) return std::make_unique<FlatIndex>(std::move(vectors));
  const size_t free = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first;
  return std::make_unique<DeviceFlatIndex>(std::move(vectors), device,
                                           static_cast<int64_t>(free / 2));
}

}  // namespace megatron
