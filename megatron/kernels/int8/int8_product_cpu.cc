// One product by three kinds of instructions, which give the same bits: each computes the integers
// of some rows and 16 outputs, and Finish scales them.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "megatron/kernels/detail/prefetch.h"
#include "megatron/kernels/int8/int8_product.h"

namespace megatron {
namespace {

constexpr int64_t kOutputs = kInt8PanelOutputs, kUnit = kInt8InnerUnit;
constexpr int64_t kGroup = 4, kGroupBytes = kGroup * kOutputs;  // inputs that lie together
constexpr int kOffset = 128;                                    // of the codes of x
constexpr int kTileRows = kInt8BlockRows, kTileBytes = kInt8InnerUnit;

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

#define MEGATRON_VNNI __attribute__((target("avx512f,avx512vnni")))

// What the outputs of a panel are scaled with.
struct Outputs {
  Outputs() = default;
  Outputs(const Int8Product& args, int64_t panel) : first(panel * kOutputs) {
    count = std::min(kOutputs, args.outputs - first);
    std::copy_n(args.scales + first, count, scales);
    if (args.bias != nullptr) std::copy_n(args.bias + first, count, bias);
    const int8_t* sums =
        args.panels + panel * int8_panel_bytes(args.inner) + int8_inner(args.inner) * kOutputs;
    for (int32_t& offset : offsets) {
      std::memcpy(&offset, sums, sizeof offset);
      offset *= kOffset;
      sums += sizeof offset;
    }
  }
  alignas(64) float scales[kOutputs] = {}, bias[kOutputs] = {};
  alignas(64) int32_t offsets[kOutputs] = {};  // the weights' sums times the offset of x
  int64_t first = 0, count = 0;
};

// The results of a row: (sum - offset) times the scales + bias + addend. Products of scales and
// sums are not rounded, by explicit instructions, so that no compiler decides it.
void finish_by_avx2(const Int8Product& args, const Outputs& own, const int32_t* sums, int64_t row) {
  const int64_t place = row * args.outputs + own.first;
  float addend[kOutputs] = {}, y[kOutputs];
  if (args.addend != nullptr) std::copy_n(args.addend + place, own.count, addend);
  for (int i = 0; i < kOutputs; i += 8) {
    const __m256i sum = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + i)),
                  offset = _mm256_load_si256(reinterpret_cast<const __m256i*>(own.offsets + i));
    const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, offset));
    const __m256 scale =
        _mm256_mul_ps(_mm256_set1_ps(args.x_scales[row]), _mm256_load_ps(own.scales + i));
    const __m256 scaled = _mm256_fmadd_ps(exact, scale, _mm256_load_ps(own.bias + i));
    _mm256_storeu_ps(y + i, _mm256_add_ps(scaled, _mm256_loadu_ps(addend + i)));
  }
  std::copy_n(y, own.count, args.y + place);
}

#define MEGATRON_VNNI __attribute__((target("avx512f,avx512vnni")))

MEGATRON_VNNI void finish_by_avx512(const Int8Product& args, const Outputs& own,
                                    const int32_t* sums, int64_t row) {
  const int64_t place = row * args.outputs + own.first;
  const auto some = static_cast<__mmask16>((1U << own.count) - 1);
  const __m512 exact = _mm512_maskz_cvtepi32_ps(
      some, _mm512_sub_epi32(_mm512_loadu_si512(sums), _mm512_load_si512(own.offsets)));
  const __m512 scale =
      _mm512_mul_ps(_mm512_set1_ps(args.x_scales[row]), _mm512_load_ps(own.scales));
  __m512 y = _mm512_fmadd_ps(exact, scale, _mm512_load_ps(own.bias));
  y = _mm512_add_ps(y, args.addend == nullptr ? _mm512_setzero_ps()
                                              : _mm512_maskz_loadu_ps(some, args.addend + place));
  // Large results go to memory past the caches, which would read the lines before they write them.
  constexpr int64_t kLarge = int64_t{1} << 20;  // elements
  float* to = args.y + place;
  if (args.rows * args.outputs >= kLarge && reinterpret_cast<uintptr_t>(to) % 64 == 0 &&
      own.count == kOutputs) {
    _mm512_stream_ps(to, y);
  } else {
    _mm512_mask_storeu_ps(to, some, y);
  }
}

uint32_t four_codes(const uint8_t* x) {
  uint32_t codes = 0;
  std::memcpy(&codes, x, sizeof codes);
  return codes;
}

// Codes of some rows of one block, from the first on.
struct Codes {
  Codes(const Int8Product& args, int64_t row) {
    const Int8RowPlace place = int8_row_place(row, args.rows, args.inner);
    first = args.x + place.first;
    step = place.step;
    steps = int8_inner(args.inner) / kUnit;
  }
  const uint8_t* first = nullptr;
  int64_t step = 0, steps = 0;  // as in Int8RowPlace, and how many
};

// 16-bit products in pairs: those of bytes would saturate.
template <int kRows>
void avx2_rows(const Codes& codes, const int8_t* panel, int32_t* sums) {
  __m256i pairs[kRows][4];
  for (auto& row : pairs)
    for (__m256i& four_outputs : row) four_outputs = _mm256_setzero_si256();
  const uint8_t* x = codes.first;
  for (int64_t step = 0; step < codes.steps; ++step, x += codes.step) {
    for (int64_t k = 0; k < kUnit; k += kGroup, panel += kGroupBytes) {
      __m256i own[kRows];
      for (int r = 0; r < kRows; ++r)
        own[r] =
            _mm256_cvtepu8_epi16(_mm_set1_epi32(static_cast<int>(four_codes(x + r * kUnit + k))));
      for (int q = 0; q < 4; ++q) {
        const __m256i weights = _mm256_cvtepi8_epi16(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + q * kGroupBytes / 4)));
        for (int r = 0; r < kRows; ++r)
          pairs[r][q] = _mm256_add_epi32(pairs[r][q], _mm256_madd_epi16(own[r], weights));
      }
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

void avx2_panel(const Int8Product& args, int64_t panel) {
  const Outputs own(args, panel);
  const int8_t* const weights = args.panels + panel * int8_panel_bytes(args.inner);
  int32_t sums[2 * kOutputs];
  for (int64_t row = 0; row < args.rows; row += 2) {
    const int64_t rows = std::min<int64_t>(2, args.rows - row);
    const Codes codes(args, row);
    rows == 2 ? avx2_rows<2>(codes, weights, sums) : avx2_rows<1>(codes, weights, sums);
    for (int64_t r = 0; r < rows; ++r) finish_by_avx2(args, own, sums + r * kOutputs, row + r);
  }
}

// kSteps sums for every row and panel hide the latency of an instruction; the next panels are asked
// for before the processor does so by itself.
template <int kRows, int kPanels, int kSteps>
MEGATRON_VNNI void vnni_rows(const Codes& codes, const int8_t* panel, int64_t panel_bytes,
                             int32_t* sums) {
  __m512i parts[kSteps][kRows][kPanels];
  for (auto& step : parts)
    for (auto& row : step)
      for (__m512i& part : row) part = _mm512_setzero_si512();
  const uint8_t* x = codes.first;
  for (int64_t step = 0; step < codes.steps; ++step, x += codes.step) {
    for (int64_t k = 0; k < kUnit; k += kSteps * kGroup, panel += kSteps * kGroupBytes) {
      for (int s = 0; s < kSteps; ++s) {
        __m512i weights[kPanels];
        for (int p = 0; p < kPanels; ++p)
          weights[p] = _mm512_loadu_si512(panel + p * panel_bytes + s * kGroupBytes);
        for (int p = 0; p < kPanels; ++p)
          fetch_into_l2(panel + (kPanels + p) * panel_bytes + s * kGroupBytes);
        for (int r = 0; r < kRows; ++r) {
          const __m512i own =
              _mm512_set1_epi32(static_cast<int>(four_codes(x + r * kUnit + k + s * kGroup)));
          for (int p = 0; p < kPanels; ++p)
            parts[s][r][p] = _mm512_dpbusd_epi32(parts[s][r][p], own, weights[p]);
        }
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

// By rows - 1: as many sums as registers hold.
using VnniRows = void (*)(const Codes&, const int8_t*, int64_t, int32_t*);
template <int kPanels>
constexpr VnniRows kVnniRows[] = {
    vnni_rows<1, kPanels, 8 / kPanels>, vnni_rows<2, kPanels, 4 / kPanels>,
    vnni_rows<3, kPanels, 4 / kPanels>, vnni_rows<4, kPanels, 4 / kPanels>,
    vnni_rows<5, kPanels, 2 / kPanels>, vnni_rows<6, kPanels, 2 / kPanels>};

template <int kPanels>
void vnni_panels(const Int8Product& args, int64_t panel) {
  constexpr int64_t kMost = std::size(kVnniRows<kPanels>);
  const int64_t bytes = int8_panel_bytes(args.inner);
  const int8_t* const weights = args.panels + panel * bytes;
  Outputs own[kPanels];
  for (int p = 0; p < kPanels; ++p) own[p] = Outputs(args, panel + p);
  int32_t sums[kMost * kPanels * kOutputs];
  for (int64_t row = 0, count = 0; row < args.rows; row += count) {
    count = std::min({kMost, args.rows - row, kInt8BlockRows - row % kInt8BlockRows});
    kVnniRows<kPanels>[count - 1](Codes(args, row), weights, bytes, sums);
    for (int64_t r = 0; r < count; ++r)
      for (int p = 0; p < kPanels; ++p)
        finish_by_avx512(args, own[p], sums + (r * kPanels + p) * kOutputs, row + r);
  }
}

#define MEGATRON_AMX __attribute__((target("amx-tile,amx-int8,avx512f,avx512vnni")))

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

// Of two times 16 rows and two panels, those of the second 16 after those of the first.
constexpr int64_t kSumStride = 2 * kOutputs, kPairElements = 2 * kTileRows * kSumStride;
struct alignas(64) PairSums {
  int32_t values[kPairElements];
};

// The block whose sums are complete: its results are written while the tiles of the next one
// multiply.
class Pending {
 public:
  explicit Pending(const Int8Product& args) : args_(args) {}

  void begin(const Outputs (&own)[2], bool two_panels, const int32_t* sums, int64_t row,
             int64_t rows) {
    own_ = own;
    panels_ = two_panels ? 2 : 1;
    sums_ = sums;
    row_ = row;
    next_ = 0;
    rows_ = rows;
  }
  MEGATRON_AMX void write(int64_t rows) {
    for (const int64_t end = std::min(rows_, next_ + rows); next_ < end; ++next_)
      for (int p = 0; p < panels_; ++p)
        finish_by_avx512(args_, own_[p], sums_ + next_ * kSumStride + p * kOutputs, row_ + next_);
  }
  MEGATRON_AMX void write() { write(rows_); }

 private:
  const Int8Product& args_;
  const Outputs* own_ = nullptr;
  int panels_ = 0;
  const int32_t* sums_ = nullptr;
  int64_t row_ = 0, next_ = 0, rows_ = 0;
};

// Adds the products of inputs of `steps` tiles to `sums`, which begin with these if `first`.
template <bool kTwoRows, bool kTwoPanels>
MEGATRON_AMX void amx_block(const uint8_t* x, const uint8_t* below, int64_t x_step,
                            const int8_t* panel, const int8_t* second, int64_t steps, bool first,
                            int32_t* sums, Pending& pending) {
  constexpr int64_t kRowBytes = kSumStride * sizeof(int32_t);
  int32_t* const sums_below = sums + kTileRows * kSumStride;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kRowBytes);
    if constexpr (kTwoPanels) _tile_loadd(1, sums + kOutputs, kRowBytes);
    if constexpr (kTwoRows) _tile_loadd(2, sums_below, kRowBytes);
    if constexpr (kTwoRows && kTwoPanels) _tile_loadd(3, sums_below + kOutputs, kRowBytes);
  }
  const int64_t rows = (2 * kTileRows + steps - 1) / steps;
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, x + step * x_step, kTileBytes);
    _tile_loadd(6, panel + step * kTileRows * kTileBytes, kTileBytes);
    _tile_dpbusd(0, 4, 6);
    if constexpr (kTwoPanels) {
      _tile_loadd(7, second + step * kTileRows * kTileBytes, kTileBytes);
      _tile_dpbusd(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, below + step * x_step, kTileBytes);
      _tile_dpbusd(2, 5, 6);
      if constexpr (kTwoPanels) _tile_dpbusd(3, 5, 7);
    }
    pending.write(rows);
  }
  _tile_stored(0, sums, kRowBytes);
  if constexpr (kTwoPanels) _tile_stored(1, sums + kOutputs, kRowBytes);
  if constexpr (kTwoRows) _tile_stored(2, sums_below, kRowBytes);
  if constexpr (kTwoRows && kTwoPanels) _tile_stored(3, sums_below + kOutputs, kRowBytes);
}

// Blocks of rows: pairs of them first. Inputs are divided into stretches whose two panels stay in
// the L1 cache while the rows pass, whose sums stay in the L2 cache.
class AmxPanels {
 public:
  explicit AmxPanels(const Int8Product& args)
      : args_(args),
        steps_(int8_inner(args.inner) / kUnit),
        sums_(static_cast<size_t>(kPairs)),
        pending_(args) {}

  MEGATRON_AMX void run(int64_t begin, int64_t end) {
    const int64_t whole = args_.rows / kTileRows * kTileRows;
    for (int64_t row = 0; row < whole; row += kPairs * 2 * kTileRows)
      rows(row, std::min(whole, row + kPairs * 2 * kTileRows), begin, end);
    if (whole < args_.rows) rows(whole, args_.rows, begin, end);
    _tile_release();
  }

 private:
  static constexpr int64_t kPairs = 16;      // of blocks of rows: 64 KiB of sums
  static constexpr int64_t kMostSteps = 12;  // 24 KiB of two panels

  // Of as many blocks as there are sums for, or of the last one, which has fewer rows.
  MEGATRON_AMX void rows(int64_t row_begin, int64_t row_end, int64_t panel_begin,
                         int64_t panel_end) {
    configure_tiles(std::min<int64_t>(kTileRows, row_end - row_begin));
    const int64_t stretches = (steps_ + kMostSteps - 1) / kMostSteps;
    for (int64_t panel = panel_begin; panel < panel_end; panel += 2) {
      const bool two_panels = panel + 1 < panel_end;
      // Those of the panels before may be pending.
      auto& own = outputs_[(panel - panel_begin) / 2 % 2];
      own[0] = Outputs(args_, panel);
      if (two_panels) own[1] = Outputs(args_, panel + 1);
      for (int64_t i = 0; i < stretches; ++i) {
        const int64_t step = steps_ * i / stretches, end = steps_ * (i + 1) / stretches;
        int32_t* sums = sums_.data()->values;
        for (int64_t row = row_begin; row < row_end; row += 2 * kTileRows, sums += kPairElements) {
          const int64_t count = std::min<int64_t>(2 * kTileRows, row_end - row);
          multiply(row, count, panel, two_panels, step, end, sums);
          if (end == steps_) pending_.begin(own, two_panels, sums, row, count);
        }
      }
    }
    pending_.write();
  }
  void multiply(int64_t row, int64_t rows, int64_t panel, bool two_panels, int64_t step,
                int64_t end, int32_t* sums) {
    const int64_t bytes = int8_panel_bytes(args_.inner);
    const int8_t* const weights = args_.panels + panel * bytes + step * kUnit * kOutputs;
    const Codes codes(args_, row);
    const uint8_t* const x = codes.first + step * codes.step;
    const uint8_t* const below = x + kTileRows * codes.steps * kUnit;
    const auto block = rows > kTileRows
                           ? (two_panels ? amx_block<true, true> : amx_block<true, false>)
                           : (two_panels ? amx_block<false, true> : amx_block<false, false>);
    block(x, below, codes.step, weights, weights + bytes, end - step, step == 0, sums, pending_);
  }

  const Int8Product& args_;
  int64_t steps_;
  std::vector<PairSums> sums_;
  Outputs outputs_[2][2];
  Pending pending_;
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
  int64_t panel = panel_begin;
  if (args.path == Int8Path::kAvx2) {
    for (; panel < panel_end; ++panel) avx2_panel(args, panel);
  } else if (args.path == Int8Path::kAmx && args.rows >= kTileRows) {
    AmxPanels(args).run(panel_begin, panel_end);
  } else {
    for (; panel + 2 <= panel_end; panel += 2) vnni_panels<2>(args, panel);
    for (; panel < panel_end; ++panel) vnni_panels<1>(args, panel);
  }
  _mm_sfence();  // behind streamed results, before another thread reads them
}

}  // namespace megatron
