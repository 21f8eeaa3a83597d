// One product by three kinds of instructions, which give the same bits: each computes the integers
// of some rows and 16 outputs, and Finish scales them.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "megatron/kernels/int8/int8_product.h"

namespace megatron {
namespace {

constexpr int64_t kOutputs = kInt8PanelOutputs;
constexpr int64_t kGroup = 4, kGroupBytes = kGroup * kOutputs;  // inputs that lie together
constexpr int kOffset = 128;                                    // of the codes of x
constexpr int kTileRows = 16, kTileBytes = 64;

bool has_vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni");
}

// Linux hands out the tiles' registers to a process that asks for them.
bool has_amx() {
  constexpr unsigned kTile = 1U << 24, kInt8 = 1U << 25;       // of CPUID leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTile) == 0 || (d & kInt8) == 0)
    return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The results of some rows, whose integers lie `stride` apart, for the 16 outputs of a panel.
class Finish {
 public:
  explicit Finish(const Int8Product& args) : args_(args) {}

  void operator()(const int32_t* sums, int64_t stride, int64_t row, int64_t rows,
                  int64_t panel) const {
    const int64_t first = panel * kOutputs, count = std::min(kOutputs, args_.outputs - first);
    const int8_t* const end =
        args_.panels + panel * int8_panel_bytes(args_.inner) + int8_inner(args_.inner) * kOutputs;
    Panel own;
    std::copy_n(args_.scales + first, count, own.scales);
    if (args_.bias != nullptr) std::copy_n(args_.bias + first, count, own.bias);
    for (int i = 0; i < kOutputs; ++i) {
      int32_t sum = 0;
      std::memcpy(&sum, end + i * static_cast<int64_t>(sizeof sum), sizeof sum);
      own.offsets[i] = kOffset * sum;
    }
    for (int64_t r = row; r < row + rows; ++r, sums += stride) {
      const int64_t place = r * args_.outputs + first;
      const float* addend = args_.addend == nullptr ? kZeros : args_.addend + place;
      float* y = args_.y + place;
      if (count == kOutputs) {
        scale_row(sums, own, args_.x_scales[r], addend, y);
      } else {
        float some_addend[kOutputs] = {}, some_y[kOutputs];
        std::copy_n(addend, count, some_addend);
        scale_row(sums, own, args_.x_scales[r], some_addend, some_y);
        std::copy_n(some_y, count, y);
      }
    }
  }

 private:
  struct Panel {
    alignas(32) float scales[kOutputs] = {}, bias[kOutputs] = {};
    alignas(32) int32_t offsets[kOutputs];  // the weights' sums times the offset of x
  };
  static constexpr float kZeros[kOutputs] = {};

  static void scale_row(const int32_t* sums, const Panel& own, float of_row, const float* addend,
                        float* y) {
    for (int i = 0; i < kOutputs; i += 8) {
      const __m256i sum = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + i)),
                    offset = _mm256_load_si256(reinterpret_cast<const __m256i*>(own.offsets + i));
      const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, offset));
      const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(of_row), _mm256_load_ps(own.scales + i));
      // Explicitly without rounding the product, so that no compiler decides it.
      const __m256 scaled = _mm256_fmadd_ps(exact, scale, _mm256_load_ps(own.bias + i));
      _mm256_storeu_ps(y + i, _mm256_add_ps(scaled, _mm256_loadu_ps(addend + i)));
    }
  }

  const Int8Product& args_;
};

uint32_t four_codes(const uint8_t* x) {
  uint32_t codes = 0;
  std::memcpy(&codes, x, sizeof codes);
  return codes;
}

// 16-bit products in pairs: those of bytes would saturate.
template <int kRows>
void avx2_rows(const uint8_t* x, int64_t inner, const int8_t* panel, int32_t* sums) {
  __m256i pairs[kRows][4];
  for (auto& row : pairs)
    for (__m256i& four_outputs : row) four_outputs = _mm256_setzero_si256();
  for (int64_t k = 0; k < inner; k += kGroup, panel += kGroupBytes) {
    __m256i own[kRows];
    for (int r = 0; r < kRows; ++r)
      own[r] =
          _mm256_cvtepu8_epi16(_mm_set1_epi32(static_cast<int>(four_codes(x + r * inner + k))));
    for (int q = 0; q < 4; ++q) {
      const __m256i weights = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + q * kGroupBytes / 4)));
      for (int r = 0; r < kRows; ++r)
        pairs[r][q] = _mm256_add_epi32(pairs[r][q], _mm256_madd_epi16(own[r], weights));
    }
  }
  // Outputs 0 1 4 5 and 2 3 6 7 after the sums of pairs.
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) {
      const __m256i mixed = _mm256_hadd_epi32(pairs[r][2 * half], pairs[r][2 * half + 1]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kOutputs + half * 8),
                          _mm256_permute4x64_epi64(mixed, 0xD8));
    }
}

void avx2_panel(const Int8Product& args, const Finish& finish, int64_t panel) {
  const int64_t inner = int8_inner(args.inner);
  const int8_t* const weights = args.panels + panel * int8_panel_bytes(args.inner);
  int32_t sums[2 * kOutputs];
  for (int64_t row = 0; row < args.rows; row += 2) {
    const int64_t rows = std::min<int64_t>(2, args.rows - row);
    const uint8_t* const x = args.x + row * inner;
    rows == 2 ? avx2_rows<2>(x, inner, weights, sums) : avx2_rows<1>(x, inner, weights, sums);
    finish(sums, kOutputs, row, rows, panel);
  }
}

#define MEGATRON_VNNI __attribute__((target("avx512f,avx512vnni")))

// kSteps sums for every row and panel hide the latency of an instruction.
template <int kRows, int kPanels, int kSteps>
MEGATRON_VNNI void vnni_rows(const uint8_t* x, int64_t inner, const int8_t* panel,
                             int64_t panel_bytes, int32_t* sums) {
  __m512i parts[kSteps][kRows][kPanels];
  for (auto& step : parts)
    for (auto& row : step)
      for (__m512i& part : row) part = _mm512_setzero_si512();
  for (int64_t k = 0; k < inner; k += kSteps * kGroup, panel += kSteps * kGroupBytes) {
    for (int s = 0; s < kSteps; ++s) {
      __m512i weights[kPanels];
      for (int p = 0; p < kPanels; ++p)
        weights[p] = _mm512_loadu_si512(panel + p * panel_bytes + s * kGroupBytes);
      for (int r = 0; r < kRows; ++r) {
        const __m512i own =
            _mm512_set1_epi32(static_cast<int>(four_codes(x + r * inner + k + s * kGroup)));
        for (int p = 0; p < kPanels; ++p)
          parts[s][r][p] = _mm512_dpbusd_epi32(parts[s][r][p], own, weights[p]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) {
      __m512i sum = parts[0][r][p];
      for (int s = 1; s < kSteps; ++s) sum = _mm512_add_epi32(sum, parts[s][r][p]);
      _mm512_storeu_si512(sums + (r * kPanels + p) * kOutputs, sum);
    }
}

// One or two rows read the weights in one stream, more rows hold two panels.
template <int kPanels>
int64_t vnni_block(int64_t rows, const uint8_t* x, int64_t inner, const int8_t* panel,
                   int64_t bytes, int32_t* sums) {
  switch (rows) {
    case 1:
      vnni_rows<1, kPanels, 8 / kPanels>(x, inner, panel, bytes, sums);
      return 1;
    case 2:
      vnni_rows<2, kPanels, 4 / kPanels>(x, inner, panel, bytes, sums);
      return 2;
    case 3:
      vnni_rows<3, kPanels, 4 / kPanels>(x, inner, panel, bytes, sums);
      return 3;
    case 4:
      vnni_rows<4, kPanels, 4 / kPanels>(x, inner, panel, bytes, sums);
      return 4;
    case 5:
      vnni_rows<5, kPanels, 2 / kPanels>(x, inner, panel, bytes, sums);
      return 5;
    default:
      vnni_rows<6, kPanels, 2 / kPanels>(x, inner, panel, bytes, sums);
      return 6;
  }
}

template <int kPanels>
void vnni_panels(const Int8Product& args, const Finish& finish, int64_t panel) {
  const int64_t inner = int8_inner(args.inner), bytes = int8_panel_bytes(args.inner);
  const int8_t* const weights = args.panels + panel * bytes;
  int32_t sums[6 * kPanels * kOutputs];
  for (int64_t row = 0; row < args.rows;) {
    const int64_t done =
        vnni_block<kPanels>(args.rows - row, args.x + row * inner, inner, weights, bytes, sums);
    for (int p = 0; p < kPanels; ++p)
      finish(sums + p * kOutputs, kPanels * kOutputs, row, done, panel + p);
    row += done;
  }
}

#define MEGATRON_AMX __attribute__((target("amx-tile,amx-int8")))

// Tiles 0 to 3 sums of two times 16 rows and two panels, 4 and 5 rows, 6 and 7 weights.
MEGATRON_AMX void configure_tiles(int64_t rows) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof config == 64);
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileBytes;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
  }
  __asm__ volatile("" : : "m"(config));  // GCC knows of the intrinsic's first 8 bytes alone
  _tile_loadconfig(&config);
}

template <bool kTwoRows, bool kTwoPanels>
MEGATRON_AMX void amx_block(const uint8_t* x, int64_t inner, const int8_t* panel,
                            int64_t panel_bytes, int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int8_t* const second = panel + panel_bytes;
  const uint8_t* const below = x + kTileRows * inner;
  for (int64_t k = 0; k < inner; k += kTileBytes) {
    _tile_loadd(4, x + k, inner);
    _tile_loadd(6, panel + k * kOutputs, kTileBytes);
    _tile_dpbusd(0, 4, 6);
    if constexpr (kTwoPanels) {
      _tile_loadd(7, second + k * kOutputs, kTileBytes);
      _tile_dpbusd(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, below + k, inner);
      _tile_dpbusd(2, 5, 6);
      if constexpr (kTwoPanels) _tile_dpbusd(3, 5, 7);
    }
  }
  constexpr int64_t kStride = 2 * kOutputs, kRowBytes = kStride * sizeof(int32_t);
  _tile_stored(0, sums, kRowBytes);
  if constexpr (kTwoPanels) _tile_stored(1, sums + kOutputs, kRowBytes);
  if constexpr (kTwoRows) _tile_stored(2, sums + kTileRows * kStride, kRowBytes);
  if constexpr (kTwoRows && kTwoPanels)
    _tile_stored(3, sums + kTileRows * kStride + kOutputs, kRowBytes);
}

// Rows from `row` on that fill tiles of `rows` rows: pairs of tiles first.
class AmxPanels {
 public:
  AmxPanels(const Int8Product& args, const Finish& finish) : args_(args), finish_(finish) {}

  void run(int64_t begin, int64_t end) {
    const int64_t whole = args_.rows / kTileRows * kTileRows;
    if (whole > 0) rows(0, whole, begin, end);
    if (whole < args_.rows) rows(whole, args_.rows, begin, end);
    release();
  }

 private:
  MEGATRON_AMX static void release() { _tile_release(); }

  void rows(int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    const int64_t each = std::min<int64_t>(kTileRows, row_end - row_begin);
    configure_tiles(each);
    for (int64_t panel = begin; panel < end; panel += 2)
      for (int64_t row = row_begin; row < row_end; row += 2 * each)
        block(row, std::min(2 * each, row_end - row), panel, panel + 1 < end);
  }
  void block(int64_t row, int64_t rows, int64_t panel, bool two_panels) {
    const int64_t inner = int8_inner(args_.inner), bytes = int8_panel_bytes(args_.inner);
    const uint8_t* const x = args_.x + row * inner;
    const int8_t* const weights = args_.panels + panel * bytes;
    alignas(64) int32_t sums[4 * kTileRows * kOutputs];
    if (rows > kTileRows) {
      two_panels ? amx_block<true, true>(x, inner, weights, bytes, sums)
                 : amx_block<true, false>(x, inner, weights, bytes, sums);
    } else {
      two_panels ? amx_block<false, true>(x, inner, weights, bytes, sums)
                 : amx_block<false, false>(x, inner, weights, bytes, sums);
    }
    for (int p = 0; p <= static_cast<int>(two_panels); ++p)
      finish_(sums + p * kOutputs, 2 * kOutputs, row, rows, panel + p);
  }

  const Int8Product& args_;
  const Finish& finish_;
};

}  // namespace

const std::vector<Int8Path>& int8_paths() {
  static const std::vector<Int8Path> paths = [] {
    std::vector<Int8Path> found{Int8Path::kAvx2};
    if (has_vnni()) found.push_back(Int8Path::kVnni);
    if (has_vnni() && has_amx()) found.push_back(Int8Path::kAmx);
    return found;
  }();
  return paths;
}

void int8_product_cpu(const Int8Product& args, int64_t panel_begin, int64_t panel_end) {
  const Finish finish(args);
  if (args.path == Int8Path::kAmx && args.rows >= kTileRows)
    return AmxPanels(args, finish).run(panel_begin, panel_end);
  int64_t panel = panel_begin;
  if (args.path == Int8Path::kAvx2) {
    for (; panel < panel_end; ++panel) avx2_panel(args, finish, panel);
    return;
  }
  if (args.rows > 2)
    for (; panel + 2 <= panel_end; panel += 2) vnni_panels<2>(args, finish, panel);
  for (; panel < panel_end; ++panel) vnni_panels<1>(args, finish, panel);
}

}  // namespace megatron
