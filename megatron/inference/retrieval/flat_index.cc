#include "megatron/inference/retrieval/flat_index.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kTileQueries = 1024, kTileRows = 4096;  // of one product, 16 MiB of fp32

double squared_length(const float* row, int64_t width) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += static_cast<double>(row[i]) * row[i];
  return sum;
}

double squared_distance(const float* a, const float* b, int64_t width) {
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    sum += d * d;
  }
  return sum;
}

struct Found {
  double distance = 0;
  int64_t id = -1;
  bool operator<(const Found& other) const {
    return distance < other.distance || (distance == other.distance && id < other.id);
  }
};

// The k best of what it is given, the worst of them first: a heap.
class Nearest {
 public:
  explicit Nearest(int64_t k) : k_(static_cast<size_t>(k)) { heap_.reserve(k_); }
  // What may be among the k best is not farther.
  double limit() const {
    return heap_.size() < k_ ? std::numeric_limits<double>::infinity() : heap_.front().distance;
  }
  void add(const Found& found) {
    if (heap_.size() == k_) {
      if (!(found < heap_.front())) return;
      std::pop_heap(heap_.begin(), heap_.end());
      heap_.pop_back();
    }
    heap_.push_back(found);
    std::push_heap(heap_.begin(), heap_.end());
  }
  // Nearest first, -1 behind.
  void write(std::span<int64_t> out) {
    std::sort(heap_.begin(), heap_.end());
    std::fill(out.begin(), out.end(), -1);
    std::transform(heap_.begin(), heap_.end(), out.begin(), [](const Found& f) { return f.id; });
  }

 private:
  size_t k_;
  std::vector<Found> heap_;
};

// A search of `queries` in one block of vectors after the other.
class FlatSearch {
 public:
  FlatSearch(std::span<const float> queries, int64_t width, int64_t k)
      : queries_(queries), width_(width), count_(std::ssize(queries) / width) {
    for (int64_t q = 0; q < count_; ++q) {
      nearest_.emplace_back(k);
      squared_.push_back(squared_length(query(q), width));
    }
  }

  void add(const std::vector<float>& rows, int64_t first) {
    const int64_t count = std::ssize(rows) / width_;
    std::vector<double> squared(static_cast<size_t>(count)), lengths(squared.size());
    parallel_tasks(count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i);
        squared[at] = squared_length(rows.data() + i * width_, width_);
        lengths[at] = std::sqrt(squared[at]);
      }
    });
    for (int64_t r = 0; r < count; r += kTileRows)
      for (int64_t q = 0; q < count_; q += kTileQueries)
        add_tile({rows.data() + r * width_, squared.data() + r, lengths.data() + r, first + r,
                  std::min(kTileRows, count - r)},
                 q, std::min(kTileQueries, count_ - q));
  }

  std::vector<int64_t> result(int64_t k) {
    std::vector<int64_t> ids(static_cast<size_t>(count_ * k));
    for (int64_t q = 0; q < count_; ++q)
      nearest_[static_cast<size_t>(q)].write(std::span(ids).subspan(static_cast<size_t>(q * k), k));
    return ids;
  }

 private:
  struct Rows {
    const float* data;
    const double *squared, *lengths;
    int64_t first, count;
  };

  const float* query(int64_t q) const { return queries_.data() + q * width_; }

  void add_tile(const Rows& rows, int64_t first_query, int64_t queries) {
    const auto matrix = [&](const float* data, int64_t count) {
      return at::from_blob(const_cast<float*>(data), {count, width_}, at::kFloat);
    };
    const at::Tensor products =
        at::mm(matrix(query(first_query), queries), matrix(rows.data, rows.count).t());
    const float* product = products.const_data_ptr<float>();
    parallel_tasks(queries, 1, [&](int64_t begin, int64_t end) {
      for (int64_t q = begin; q < end; ++q)
        add_row(rows, first_query + q, product + q * rows.count);
    });
  }

  // See Note [Exact neighbours from fp32 products]. A product may also lose what is below the
  // smallest number of fp32.
  void add_row(const Rows& rows, int64_t q, const float* products) {
    constexpr double kUnit = 0x1p-24;
    const double fp64 = static_cast<double>(width_) * 0x1p-50;  // of the sums in fp64
    const double terms = static_cast<double>(width_) + 1;
    const double own = squared_[static_cast<size_t>(q)];
    const double bound = 2 * std::sqrt(own) * terms * kUnit / (1 - terms * kUnit);
    const double lost = 2 * terms * std::numeric_limits<float>::min();
    Nearest& nearest = nearest_[static_cast<size_t>(q)];
    for (int64_t i = 0; i < rows.count; ++i) {
      const double both = own + rows.squared[i];
      const double error = bound * rows.lengths[i] + lost + fp64 * both;
      if (both - 2 * static_cast<double>(products[i]) - error > nearest.limit()) continue;
      nearest.add({squared_distance(query(q), rows.data + i * width_, width_), rows.first + i});
    }
  }

  std::span<const float> queries_;
  int64_t width_, count_;
  std::vector<double> squared_;
  std::vector<Nearest> nearest_;
};

}  // namespace

FlatIndex::FlatIndex(BlockFiles vectors) : vectors_(std::move(vectors)) {}

std::vector<int64_t> FlatIndex::search(std::span<const float> queries, int64_t k) const {
  MEGATRON_ASSERT(k > 0 && std::ssize(queries) % width() == 0);
  FlatSearch search(queries, width(), k);
  for (int64_t i = 0; i < vectors_.num_blocks(); ++i) {
    const RowBlock block = vectors_.block(i);
    search.add(read_chunk_vectors(vectors_, block), block.begin);
  }
  return search.result(k);
}

}  // namespace megatron
