// Products of 8-bit integers on CPUs: y = x w^T, with a scale for every row of x (a token) and of w
// (an output), codes from -127 to 127. Sums are exact 32-bit integers, so the result of a row has
// the same bits alone, among others and on every processor.
//
// Weights lie in panels of 16 outputs: for 4 inputs after the other the 16 x 4 codes, then the 16
// sums of codes over all inputs (int32). Outputs are padded to 16 and inputs to 64, with zeros.
// Codes of x are stored as code + 128, which the instructions of processors want without a sign;
// the sums of the weights take that off again. They lie in blocks of 16 rows, the last of the rest:
// for 64 inputs after the other the rows x 64 codes, which is what a tile of AMX holds.
#pragma once

#include <cstdint>
#include <vector>

#include "megatron/base/dtype.h"

namespace megatron {

constexpr int64_t kInt8PanelOutputs = 16, kInt8InnerUnit = 64, kInt8BlockRows = 16;

constexpr int64_t int8_inner(int64_t inner) {
  return (inner + kInt8InnerUnit - 1) / kInt8InnerUnit * kInt8InnerUnit;
}
constexpr int64_t int8_panels(int64_t outputs) {
  return (outputs + kInt8PanelOutputs - 1) / kInt8PanelOutputs;
}
constexpr int64_t int8_panel_bytes(int64_t inner) {
  return kInt8PanelOutputs * (int8_inner(inner) + static_cast<int64_t>(sizeof(int32_t)));
}

// Codes of x of a row from input 0 on; those of the next 64 inputs lie `step` bytes behind.
struct Int8RowPlace {
  int64_t first = 0, step = 0;
};
constexpr Int8RowPlace int8_row_place(int64_t row, int64_t rows, int64_t inner) {
  const int64_t begin = row / kInt8BlockRows * kInt8BlockRows,
                count = rows - begin < kInt8BlockRows ? rows - begin : kInt8BlockRows;
  return {begin * int8_inner(inner) + (row - begin) * kInt8InnerUnit, count * kInt8InnerUnit};
}

// Instructions that multiply: of AVX2, of AVX-512 VNNI, the tiles of AMX (from 16 rows on).
enum class Int8Path : uint8_t { kAvx2, kVnni, kAmx };
// Those that this processor has, the fastest last.
const std::vector<Int8Path>& int8_paths();

// A scale is the largest magnitude of the row over 127; 0 for a row of zeros, NaN for one that
// holds an infinity or NaN.
struct Int8Weights {
  DType dtype = DType::kFloat32;  // of w
  int64_t outputs = 0, inner = 0;
  const void* w = nullptr;   // [outputs, inner]
  int8_t* panels = nullptr;  // [int8_panels(outputs), int8_panel_bytes(inner)], 64-byte aligned
  float* scales = nullptr;   // [outputs]
};
void int8_weights_cpu(const Int8Weights& args, int64_t panel_begin, int64_t panel_end);

struct Int8Rows {
  DType dtype = DType::kFloat32;  // of x
  int64_t rows = 0, inner = 0;
  const void* x = nullptr;   // [rows, inner]
  uint8_t* codes = nullptr;  // rows * int8_inner(inner)
  float* scales = nullptr;   // [rows]
};
void int8_rows_cpu(const Int8Rows& args, int64_t row_begin, int64_t row_end);

struct Int8Product {
  int64_t rows = 0, outputs = 0, inner = 0;
  const uint8_t* x = nullptr;       // of int8_rows_cpu()
  const float* x_scales = nullptr;  // likewise
  const int8_t* panels = nullptr;   // of int8_weights_cpu()
  const float* scales = nullptr;    // likewise
  const float* bias = nullptr;      // [outputs], added; null: none
  const float* addend = nullptr;    // [rows, outputs], added; null: none
  float* y = nullptr;               // [rows, outputs]
  Int8Path path = Int8Path::kAvx2;  // one of int8_paths()
};
void int8_product_cpu(const Int8Product& args, int64_t panel_begin, int64_t panel_end);

}  // namespace megatron
