#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "megatron/kernels/few_rows_product.h"

namespace megatron {
namespace {

// Eight fp32 or four fp64 numbers. Products are added without rounding, explicitly: what compilers
// contract by themselves may differ from tile to tile.
template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = __m256;
  static type add_product(type a, type b, type sum) { return _mm256_fmadd_ps(a, b, sum); }
};
template <>
struct VectorOf<double> {
  using type = __m256d;
  static type add_product(type a, type b, type sum) { return _mm256_fmadd_pd(a, b, sum); }
};

template <class T>
class Product {
 public:
  explicit Product(const FewRowsProduct& args)
      : rows_(args.rows),
        columns_(args.columns),
        inner_(args.inner),
        x_(static_cast<const T*>(args.x)),
        w_(static_cast<const T*>(args.w)),
        out_(static_cast<T*>(args.out)) {}

  // One or two rows take as long as reading the weights, which is fastest in one stream; more rows
  // want their own numbers in registers for several columns.
  void run(int64_t begin, int64_t end) const {
    if (rows_ > 2)
      for (; begin + 3 <= end; begin += 3) all_rows<3>(begin);
    for (; begin < end; ++begin) all_rows<1>(begin);
  }

 private:
  using Vector = typename VectorOf<T>::type;
  static constexpr int kLanes = 32 / sizeof(T);

  static Vector load(const T* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static T sum(const Vector& v) {
    T lanes[kLanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int n = kLanes / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    return lanes[0];
  }

  // Twelve sums, four rows and three columns, fit into the registers of AVX2.
  template <int kColumns>
  void all_rows(int64_t column) const {
    int64_t row = 0;
    if (kColumns > 1 && rows_ >= 4) {  // the first tile brings the next columns into the cache
      tile<4, kColumns, /*kAhead=*/true>(row, column);
      row = 4;
    }
    for (; row + 4 <= rows_; row += 4) tile<4, kColumns>(row, column);
    for (; row + 2 <= rows_; row += 2) tile<2, kColumns>(row, column);
    if (row < rows_) tile<1, kColumns>(row, column);
  }

  template <int kRows, int kColumns, bool kAhead = false>
  void tile(int64_t row, int64_t column) const {
    const T* x = x_ + row * inner_;
    const T* w = w_ + column * inner_;
    Vector sums[kRows][kColumns] = {};
    int64_t i = 0;
    for (; i + kLanes <= inner_; i += kLanes) {
      Vector own[kRows];
      for (int r = 0; r < kRows; ++r) own[r] = load(x + r * inner_ + i);
      for (int c = 0; c < kColumns; ++c) {
        if (kAhead) __builtin_prefetch(w + (c + kColumns) * inner_ + i);
        const Vector weight = load(w + c * inner_ + i);
        for (int r = 0; r < kRows; ++r)
          sums[r][c] = VectorOf<T>::add_product(own[r], weight, sums[r][c]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < kColumns; ++c) {
        T all = sum(sums[r][c]);
        for (int64_t j = i; j < inner_; ++j)
          all = std::fma(x[r * inner_ + j], w[c * inner_ + j], all);
        out_[(row + r) * columns_ + column + c] = all;
      }
  }

  int64_t rows_, columns_, inner_;
  const T *x_, *w_;
  T* out_;
};

}  // namespace

void few_rows_product_cpu(const FewRowsProduct& args, int64_t column_begin, int64_t column_end) {
  if (args.dtype == DType::kFloat64)
    Product<double>(args).run(column_begin, column_end);
  else
    Product<float>(args).run(column_begin, column_end);
}

}  // namespace megatron
