#include "megatron/interop/huggingface/hf_quantized.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kFp8Block = 128, kMxBlock = 32;

float value_of_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

std::array<float, 256> table_of_e4m3() {
  std::array<float, 256> values{};
  for (size_t code = 0; code < values.size(); ++code)
    values[code] = value_of_e4m3(static_cast<uint8_t>(code));
  return values;
}

constexpr float kE2M1[] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(code - 127).
float value_of_e8m0(uint8_t code) {
  return code == 255 ? std::nanf("") : std::ldexp(1.0f, static_cast<int>(code) - 127);
}

// A matrix of codes, row by row, and its scales.
struct CodedMatrix {
  bool mxfp4 = false;  // else fp8
  int64_t rows = 0, columns = 0;
  TensorFiles::Place codes, scales;
  uint64_t begin = 0, end = 0;  // of the numbers in the source

  int64_t code_row_bytes() const { return mxfp4 ? columns / 2 : columns; }
  int64_t scale_row_bytes() const {
    return mxfp4 ? columns / kMxBlock
                 : (columns + kFp8Block - 1) / kFp8Block * static_cast<int64_t>(sizeof(float));
  }
  int64_t scale_row(int64_t row) const { return mxfp4 ? row : row / kFp8Block; }
};

class Dequantised : public ComputedBytes {
 public:
  Dequantised(std::shared_ptr<const TensorFiles> files, DType dtype,
              std::vector<CodedMatrix> matrices)
      : files_(std::move(files)), dtype_(dtype), matrices_(std::move(matrices)) {}

  void read_at(uint64_t offset, void* out, size_t bytes) const override {
    const auto size = static_cast<uint64_t>(size_of(dtype_));
    MEGATRON_ASSERT(offset % size == 0 && bytes % size == 0, "parts of dequantised numbers");
    auto* at = static_cast<std::byte*>(out);
    const uint64_t end = offset + bytes;
    auto matrix =
        std::upper_bound(matrices_.begin(), matrices_.end(), offset,
                         [](uint64_t wanted, const CodedMatrix& m) { return wanted < m.end; });
    for (; matrix != matrices_.end() && matrix->begin < end; ++matrix) {
      const uint64_t from = std::max(offset, matrix->begin), to = std::min(end, matrix->end);
      read_elements(*matrix, static_cast<int64_t>((from - matrix->begin) / size),
                    static_cast<int64_t>((to - matrix->begin) / size), at + (from - offset));
    }
  }

 private:
  // The numbers [first, last) of a matrix, several rows at a time.
  void read_elements(const CodedMatrix& m, int64_t first, int64_t last, std::byte* out) const {
    constexpr int64_t kMostElements = 1 << 18;  // at a time, to bound memory
    const int64_t most_rows = std::max<int64_t>(1, kMostElements / m.columns);
    std::vector<std::byte> codes, scales;
    std::vector<float> values;
    while (first < last) {
      const int64_t row = first / m.columns,
                    end_row = std::min((last - 1) / m.columns + 1, row + most_rows);
      const int64_t end = std::min(last, end_row * m.columns);
      read_rows(m.codes, row, end_row, m.code_row_bytes(), codes);
      read_rows(m.scales, m.scale_row(row), m.scale_row(end_row - 1) + 1, m.scale_row_bytes(),
                scales);
      values.resize(static_cast<size_t>((end_row - row) * m.columns));
      for (int64_t r = row; r < end_row; ++r)
        decode(m, codes.data() + (r - row) * m.code_row_bytes(),
               scales.data() + (m.scale_row(r) - m.scale_row(row)) * m.scale_row_bytes(),
               values.data() + (r - row) * m.columns);
      at::from_blob(out, {end - first}, to_scalar_type(dtype_))
          .copy_(at::from_blob(values.data() + (first - row * m.columns), {end - first}));
      out += (end - first) * size_of(dtype_);
      first = end;
    }
  }

  void read_rows(const TensorFiles::Place& place, int64_t first, int64_t end, int64_t row_bytes,
                 std::vector<std::byte>& into) const {
    into.resize(static_cast<size_t>((end - first) * row_bytes));
    files_->read(place, static_cast<uint64_t>(first * row_bytes), into);
  }

  // A row.
  static void decode(const CodedMatrix& m, const std::byte* codes, const std::byte* scales,
                     float* out) {
    static const std::array<float, 256> e4m3 = table_of_e4m3();
    const auto* in = reinterpret_cast<const uint8_t*>(codes);
    const int64_t block = m.mxfp4 ? kMxBlock : kFp8Block;
    for (int64_t begin = 0; begin < m.columns; begin += block) {
      const int64_t end = std::min(begin + block, m.columns);
      float scale = 0;
      if (m.mxfp4)
        scale = value_of_e8m0(static_cast<uint8_t>(scales[begin / block]));
      else
        std::memcpy(&scale, scales + begin / block * static_cast<int64_t>(sizeof scale),
                    sizeof scale);
      for (int64_t c = begin; c < end; ++c)
        out[c] =
            scale * (m.mxfp4 ? kE2M1[c % 2 == 0 ? in[c / 2] & 15 : in[c / 2] >> 4] : e4m3[in[c]]);
    }
  }

  const std::shared_ptr<const TensorFiles> files_;
  const DType dtype_;
  const std::vector<CodedMatrix> matrices_;  // by begin
};

// Collects the matrices of a folder.
class Finder {
 public:
  explicit Finder(HfSource& source)
      : source_(source),
        files_(std::make_shared<TensorFiles>(TensorFiles::of_hf_folder(source.files.folder()))) {}

  void run() {
    const bool mxfp4 = source_.model.quantization == "mxfp4";
    for (const auto& [name, place] : files_->places()) {
      if (mxfp4 && name.ends_with(kBlocks)) add_mxfp4(name, place);
      if (!mxfp4 && place.entry->dtype == DType::kFloat8E4M3) add_fp8(name, place);
    }
    if (entries_.empty()) return;
    StoredFile file;
    file.name = "dequantised weights";
    file.bytes = end_;
    file.has_checksums = false;
    file.source = std::make_shared<Dequantised>(files_, source_.model.dtype, std::move(matrices_));
    source_.files.replace(used_, std::move(file), std::move(entries_));
  }

 private:
  static constexpr std::string_view kBlocks = "_blocks";

  void add_fp8(const std::string& name, const TensorFiles::Place& codes) {
    const std::vector<int64_t>& shape = codes.entry->shape;
    if (shape.size() != 2) {
      source_.problems.push_back(cat(name, " is stored as F8_E4M3 with ", shape.size(),
                                     " dimensions, which is not built"));
      return;
    }
    const auto blocks = [](int64_t extent) { return (extent + kFp8Block - 1) / kFp8Block; };
    add(name, shape, {false, shape[0], shape[1], codes}, name, name + "_scale_inv",
        {blocks(shape[0]), blocks(shape[1])}, DType::kFloat32);
  }

  void add_mxfp4(const std::string& stored, const TensorFiles::Place& codes) {
    std::vector<int64_t> shape = codes.entry->shape;
    if (shape.size() < 3 || shape.back() != kMxBlock / 2 || codes.entry->dtype != DType::kUInt8) {
      source_.problems.push_back(cat(stored, " (in ", files_->name_of(codes.file), ") has shape ",
                                     format_shape(shape), " of ", to_string(codes.entry->dtype),
                                     ", expected 16 bytes of U8 in every block"));
      return;
    }
    const std::string name = stored.substr(0, stored.size() - kBlocks.size());
    shape.pop_back();
    const std::vector<int64_t> scales = shape;
    shape.back() *= kMxBlock;
    int64_t rows = 1;
    for (size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
    source_.straight.insert(name);
    add(name, shape, {true, rows, shape.back(), codes}, stored, name + "_scales", scales,
        DType::kUInt8);
  }

  void add(const std::string& name, const std::vector<int64_t>& shape, CodedMatrix matrix,
           const std::string& codes, const std::string& scales,
           const std::vector<int64_t>& scales_shape, DType scales_dtype) {
    used_.insert(codes);
    matrix.begin = end_;
    end_ += static_cast<uint64_t>(matrix.rows * matrix.columns * size_of(source_.model.dtype));
    matrix.end = end_;
    entries_.push_back({name, source_.model.dtype, shape, matrix.begin, matrix.end});
    const auto found = files_->places().find(scales);
    if (found == files_->places().end()) {
      source_.problems.push_back(
          cat(scales, " is not in the files, which hold ", codes, ", codes that it belongs to"));
      return;
    }
    used_.insert(scales);
    const SafetensorsEntry& entry = *found->second.entry;
    if (entry.shape != scales_shape || entry.dtype != scales_dtype) {
      source_.problems.push_back(cat(scales, " (in ", files_->name_of(found->second.file), ") is ",
                                     to_string(entry.dtype), " ", format_shape(entry.shape),
                                     ", the codes of ", codes, " need ", to_string(scales_dtype),
                                     " ", format_shape(scales_shape)));
      return;
    }
    matrix.scales = found->second;
    if (matrix.end > matrix.begin) matrices_.push_back(std::move(matrix));
  }

  HfSource& source_;
  const std::shared_ptr<const TensorFiles> files_;
  std::set<std::string> used_;
  std::vector<CodedMatrix> matrices_;
  std::vector<SafetensorsEntry> entries_;
  uint64_t end_ = 0;
};

}  // namespace

void dequantise(HfSource& source) {
  if (!source.model.quantization.empty()) Finder(source).run();
}

}  // namespace megatron
