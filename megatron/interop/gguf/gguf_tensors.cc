#include "megatron/interop/gguf/gguf_tensors.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "megatron/base/check.h"

namespace megatron {
namespace {

struct PlacedPart {
  GgufPart part;
  DType dtype = DType::kFloat32;
  uint64_t begin = 0, end = 0;  // bytes
};

int64_t num_elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

class GgufSource : public ComputedBytes {
 public:
  GgufSource(std::shared_ptr<const GgufFile> file, std::vector<PlacedPart> parts)
      : file_(std::move(file)), parts_(std::move(parts)) {}

  void read_at(uint64_t offset, void* out, size_t bytes) const override {
    auto* at = static_cast<std::byte*>(out);
    const uint64_t end = offset + bytes;
    auto part =
        std::upper_bound(parts_.begin(), parts_.end(), offset,
                         [](uint64_t wanted, const PlacedPart& p) { return wanted < p.end; });
    std::memset(out, 0, bytes);  // between tensors
    for (; part != parts_.end() && part->begin < end; ++part) {
      const uint64_t from = std::max(offset, part->begin), to = std::min(end, part->end);
      read_part(*part, from - part->begin, to - from, at + (from - offset));
    }
  }

 private:
  // Bytes of a part, which need not be whole elements.
  void read_part(const PlacedPart& placed, uint64_t offset, uint64_t bytes, std::byte* out) const {
    const auto size = static_cast<uint64_t>(size_of(placed.dtype));
    const uint64_t first = offset / size, last = (offset + bytes + size - 1) / size;
    if (offset % size == 0 && bytes % size == 0)
      return read_elements(placed, static_cast<int64_t>(first), static_cast<int64_t>(last), out);
    std::vector<std::byte> whole((last - first) * size);
    read_elements(placed, static_cast<int64_t>(first), static_cast<int64_t>(last), whole.data());
    std::memcpy(out, whole.data() + (offset - first * size), bytes);
  }

  void read_elements(const PlacedPart& placed, int64_t first, int64_t last, std::byte* out) const {
    const GgufPart& part = placed.part;
    if (part.values != nullptr) return read_heads(placed, first, last, out);
    if (part.order.is_same())
      return read_run(placed, *part.tensor, part.first + first, last - first, out);
    const int64_t columns = num_elements(part.shape) / part.shape[0];
    for (int64_t at = first; at < last;) {
      const int64_t row = at / columns, column = at % columns;
      const int64_t count = std::min(columns - column, last - at);
      read_run(placed, *part.tensor, part.first + part.order.in_file(row) * columns + column, count,
               out);
      out += count * size_of(placed.dtype);
      at += count;
    }
  }

  void read_heads(const PlacedPart& placed, int64_t first, int64_t last, std::byte* out) const {
    const GgufPart& part = placed.part;
    const int64_t columns = part.shape[1], keys = part.tensor->shape[2],
                  rows = keys + part.values->shape[1], size = size_of(placed.dtype);
    std::vector<std::byte> head;  // [columns, keys] of head `held`
    int64_t held = -1;
    for (int64_t at = first; at < last;) {
      const int64_t row = at / columns % rows, column = at % columns, which = at / columns / rows;
      const int64_t count = std::min(columns - column, last - at);
      if (row >= keys) {
        read_run(placed, *part.values, (which * (rows - keys) + row - keys) * columns + column,
                 count, out);
      } else {
        head.resize(static_cast<size_t>(columns * keys * size));
        if (held != which)
          read_run(placed, *part.tensor, which * columns * keys, columns * keys, head.data());
        held = which;
        for (int64_t i = 0; i < count; ++i)
          std::memcpy(out + i * size, head.data() + ((column + i) * keys + row) * size,
                      static_cast<size_t>(size));
      }
      out += count * size;
      at += count;
    }
  }

  // Consecutive elements of a tensor of the part in the file.
  void read_run(const PlacedPart& placed, const GgufTensor& tensor, int64_t first, int64_t count,
                std::byte* out) const {
    const GgmlType& type = *tensor.type;
    if (type.bytes == size_of(placed.dtype) && !type.is_quantized() && placed.part.shift == 0.0f) {
      file_->read_at(tensor.offset + static_cast<uint64_t>(first * type.bytes), out,
                     static_cast<size_t>(count * type.bytes));
      return;
    }
    constexpr int64_t kMostElements = 1 << 16;  // at a time, to bound memory
    std::vector<std::byte> blocks;
    std::vector<float> decoded;
    for (const int64_t end = first + count; first < end;) {
      const int64_t begin_block = first / type.block;
      const int64_t last = std::min(end, (begin_block * type.block) + kMostElements);
      const int64_t num_blocks = (last + type.block - 1) / type.block - begin_block;
      blocks.resize(static_cast<size_t>(num_blocks * type.bytes));
      decoded.resize(static_cast<size_t>(num_blocks * type.block));
      file_->read_at(tensor.offset + static_cast<uint64_t>(begin_block * type.bytes), blocks.data(),
                     blocks.size());
      type.decode(blocks.data(), num_blocks, decoded.data());
      const float* const wanted = decoded.data() + (first - begin_block * type.block);
      for (int64_t i = 0; i < last - first; ++i) {
        const float value = wanted[i] + placed.part.shift;
        std::memcpy(out + i * int64_t{sizeof value}, &value, sizeof value);
      }
      out += (last - first) * int64_t{sizeof(float)};
      first = last;
    }
  }

  const std::shared_ptr<const GgufFile> file_;
  const std::vector<PlacedPart> parts_;  // by begin
};

// Of each part its tensor, or both.
std::vector<const GgufTensor*> tensors_of(const std::vector<GgufPart>& parts) {
  std::vector<const GgufTensor*> tensors;
  for (const GgufPart& part : parts)
    for (const GgufTensor* tensor : {part.tensor, part.values})
      if (tensor != nullptr) tensors.push_back(tensor);
  return tensors;
}

// Whether every tensor keeps the type it has in the file.
bool keeps_types(const std::vector<GgufPart>& parts) {
  std::set<uint32_t> types;
  bool quantized = false;
  for (const GgufTensor* tensor : tensors_of(parts)) {
    if (tensor->type->name != "F32") types.insert(tensor->type->id);
    quantized |= tensor->type->is_quantized();
  }
  return types.size() <= 1 && !quantized;
}

DType stored_type(const GgufPart& part, bool keeps) {
  const std::string_view name = part.tensor->type->name;
  if (!keeps || part.shift != 0.0f) return DType::kFloat32;
  if (part.values != nullptr && part.values->type != part.tensor->type) return DType::kFloat32;
  return name == "F16" ? DType::kFloat16 : name == "BF16" ? DType::kBFloat16 : DType::kFloat32;
}

}  // namespace

TensorFiles gguf_tensor_files(std::shared_ptr<const GgufFile> file, std::vector<GgufPart> parts) {
  for (const GgufTensor* tensor : tensors_of(parts))
    MEGATRON_CHECK(tensor->type->decode != nullptr, file->place(*tensor), ": the type ",
                   tensor->type->name, " is not built\nhint: those that are: ", ggml_type_names());
  // Aligned so that blocks of the reader are whole quantised blocks.
  constexpr uint64_t kAlignment = 1024;
  const bool keeps = keeps_types(parts);
  std::vector<PlacedPart> placed;
  std::vector<SafetensorsEntry> entries;
  uint64_t end = 0;
  for (GgufPart& part : parts) {
    const DType dtype = stored_type(part, keeps);
    const uint64_t begin = (end + kAlignment - 1) / kAlignment * kAlignment;
    end = begin + static_cast<uint64_t>(num_elements(part.shape) * size_of(dtype));
    entries.push_back({part.name, dtype, part.shape, begin, end});
    placed.push_back({std::move(part), dtype, begin, end});
  }
  StoredFile stored;
  stored.name = "tensors";
  stored.bytes = end;
  stored.has_checksums = false;
  const std::filesystem::path path = file->path();
  stored.source = std::make_shared<GgufSource>(std::move(file), std::move(placed));
  return TensorFiles::of_source(path, std::move(stored), std::move(entries));
}

}  // namespace megatron
