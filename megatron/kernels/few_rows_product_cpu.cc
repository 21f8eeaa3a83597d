#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "megatron/kernels/detail/prefetch.h"
#include "megatron/kernels/few_rows_product.h"

namespace megatron {
namespace {

// Eight fp32 or four fp64 numbers. Products are added without rounding, explicitly: what a compiler
// contracts by itself may differ from tile to tile.
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

  // One or two rows take as long as reading the weights, which is fastest in two streams that ask
  // for lines before the processor does by itself; more rows want their own numbers in registers
  // for more columns.
  void run(int64_t begin, int64_t end) const {
    if (rows_ > 2) {
      for (; begin + 4 <= end; begin += 4) all_rows<4>(begin);
    } else {
      for (; begin + 2 <= end; begin += 2) all_rows<2>(begin);
    }
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
  // Lane i with i + 4, then with i + 2, then with i + 1.
  static float sum(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static double sum(__m256d v) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

  // Twelve sums, of three rows and four columns, with the numbers of the rows and a weight fill the
  // sixteen registers of AVX2.
  template <int kColumns>
  void all_rows(int64_t column) const {
    constexpr bool kAhead = kColumns > 1;  // the first tile brings the next columns into the cache
    if (rows_ == 1) return tile<1, kColumns, kAhead>(0, column);
    if (rows_ == 2) return tile<2, kColumns, kAhead>(0, column);
    tile<3, kColumns, kAhead>(0, column);
    int64_t row = 3;
    for (; row + 3 <= rows_; row += 3) tile<3, kColumns>(row, column);
    if (row + 2 <= rows_) {
      tile<2, kColumns>(row, column);
    } else if (row < rows_) {
      tile<1, kColumns>(row, column);
    }
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
        if (kAhead) fetch_into_l2(w + (c + kColumns) * inner_ + i);
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
