#include "megatron/dist_checkpointing/foreign/ggml_types.h"

#include <array>
#include <cmath>
#include <cstring>

#include "megatron/dist_checkpointing/detail/convert.h"

namespace megatron {
namespace {

// Reads the fields of a block in their order.
class BlockReader {
 public:
  explicit BlockReader(const std::byte* at) : at_(reinterpret_cast<const uint8_t*>(at)) {}
  const uint8_t* take(int64_t bytes) {
    const uint8_t* const field = at_;
    at_ += bytes;
    return field;
  }
  float half() {
    float value;
    convert_elements(take(2), DType::kFloat16, &value, DType::kFloat32, 1);
    return value;
  }

 private:
  const uint8_t* at_;
};

void decode_f32(const std::byte* in, int64_t count, float* out) {
  std::memcpy(out, in, static_cast<size_t>(count) * sizeof(float));
}
void decode_f16(const std::byte* in, int64_t count, float* out) {
  convert_elements(in, DType::kFloat16, out, DType::kFloat32, count);
}
void decode_bf16(const std::byte* in, int64_t count, float* out) {
  convert_elements(in, DType::kBFloat16, out, DType::kFloat32, count);
}

// Blocks of 32: the low halves of 16 bytes, then the high ones.
template <class Value>
void for_each_nibble(const uint8_t* bytes, const Value& value) {
  for (int i = 0; i < 16; ++i) value(i, bytes[i] & 15);
  for (int i = 0; i < 16; ++i) value(16 + i, bytes[i] >> 4);
}

int bit(const uint8_t* bytes, int i) { return bytes[i / 8] >> (i % 8) & 1; }

void decode_q4_0(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half();
  for_each_nibble(block.take(16), [&](int i, int q) { out[i] = d * static_cast<float>(q - 8); });
}

void decode_q4_1(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half(), m = block.half();
  for_each_nibble(block.take(16), [&](int i, int q) { out[i] = d * static_cast<float>(q) + m; });
}

void decode_q5_0(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half();
  const uint8_t* const high = block.take(4);
  for_each_nibble(block.take(16), [&](int i, int q) {
    out[i] = d * static_cast<float>((q | bit(high, i) << 4) - 16);
  });
}

void decode_q5_1(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half(), m = block.half();
  const uint8_t* const high = block.take(4);
  for_each_nibble(block.take(16), [&](int i, int q) {
    out[i] = d * static_cast<float>(q | bit(high, i) << 4) + m;
  });
}

void decode_q8_0(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half();
  const uint8_t* const q = block.take(32);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(q[i])) * d;
}

constexpr std::array<int8_t, 16> kNonLinear = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

void decode_iq4_nl(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half();
  for_each_nibble(block.take(16), [&](int i, int q) {
    out[i] = d * static_cast<float>(kNonLinear[static_cast<size_t>(q)]);
  });
}

// -- blocks of 256, whose scales are quantised, too: groups of 16 or 32 elements share one

// Where the bits of a group of consecutive elements are: in one byte each, at one shift.
struct GroupBits {
  const uint8_t* at;
  int shift;
  int mask;
  int operator[](int i) const { return at[i] >> shift & mask; }
};

// Two bits per element, starting at element `i`: of each 32 bytes bits 0 and 1, then 2 and 3, ...
GroupBits two_bits(const uint8_t* bytes, int i) {
  return {bytes + i / 128 * 32 + i % 32, i % 128 / 32 * 2, 3};
}
// Four bits: of each `run` bytes the low halves, then the high ones.
GroupBits four_bits(const uint8_t* bytes, int i, int run) {
  return {bytes + i / (2 * run) * run + i % run, i % (2 * run) / run * 4, 15};
}
// One bit: of 32 bytes bit 0, then bit 1, ...
GroupBits one_bit(const uint8_t* bytes, int i) { return {bytes + i % 32, i / 32, 1}; }

void decode_q2_k(const std::byte* in, float* out) {
  BlockReader block(in);
  const uint8_t *const scales = block.take(16), *const bytes = block.take(64);
  const float d = block.half(), dmin = block.half();
  for (int group = 0; group < 16; ++group, out += 16) {
    const float scale = d * static_cast<float>(scales[group] & 15);
    const float min = dmin * static_cast<float>(scales[group] >> 4);
    const GroupBits q = two_bits(bytes, group * 16);
    for (int i = 0; i < 16; ++i) out[i] = scale * static_cast<float>(q[i]) - min;
  }
}

void decode_q3_k(const std::byte* in, float* out) {
  BlockReader block(in);
  const uint8_t *const highs = block.take(32), *const bytes = block.take(64),
                       *const scales = block.take(12);
  const float d = block.half();
  for (int group = 0; group < 16; ++group, out += 16) {
    const int low = scales[group % 8] >> (group / 8 * 4) & 15;
    const int top = scales[8 + group % 4] >> (group / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | top << 4) - 32);
    const GroupBits q = two_bits(bytes, group * 16), high = one_bit(highs, group * 16);
    for (int i = 0; i < 16; ++i) out[i] = scale * static_cast<float>(q[i] - 4 + (high[i] << 2));
  }
}

// Eight scales and eight minima of 6 bits in 12 bytes.
struct ScalesAndMinima {
  std::array<float, 8> scale, min;
  ScalesAndMinima(const uint8_t* bytes, float d, float dmin) {
    for (size_t i = 0; i < 8; ++i) {
      const int a = bytes[i % 4], b = bytes[4 + i % 4], both = bytes[8 + i % 4];
      scale[i] = d * static_cast<float>(i < 4 ? a & 63 : (both & 15) | (a >> 2 & 48));
      min[i] = dmin * static_cast<float>(i < 4 ? b & 63 : both >> 4 | (b >> 2 & 48));
    }
  }
};

void decode_q4_k(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half(), dmin = block.half();
  const ScalesAndMinima of(block.take(12), d, dmin);
  const uint8_t* const bytes = block.take(128);
  for (size_t group = 0; group < 8; ++group, out += 32) {
    const float scale = of.scale[group], min = of.min[group];
    const GroupBits q = four_bits(bytes, static_cast<int>(group) * 32, 32);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(q[i]) - min;
  }
}

void decode_q5_k(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half(), dmin = block.half();
  const ScalesAndMinima of(block.take(12), d, dmin);
  const uint8_t *const highs = block.take(32), *const bytes = block.take(128);
  for (size_t group = 0; group < 8; ++group, out += 32) {
    const float scale = of.scale[group], min = of.min[group];
    const int first = static_cast<int>(group) * 32;
    const GroupBits q = four_bits(bytes, first, 32), high = one_bit(highs, first);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(q[i] | high[i] << 4) - min;
  }
}

void decode_q6_k(const std::byte* in, float* out) {
  BlockReader block(in);
  const uint8_t *const lows = block.take(128), *const highs = block.take(64),
                       *const scales = block.take(16);
  const float d = block.half();
  for (int group = 0; group < 16; ++group, out += 16) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(scales[group]));
    const GroupBits low = four_bits(lows, group * 16, 64), high = two_bits(highs, group * 16);
    for (int i = 0; i < 16; ++i) out[i] = scale * static_cast<float>((low[i] | high[i] << 4) - 32);
  }
}

void decode_iq4_xs(const std::byte* in, float* out) {
  BlockReader block(in);
  const float d = block.half();
  const uint8_t *const high = block.take(2), *const low = block.take(4);
  const uint8_t* const bytes = block.take(128);
  const int tops = high[0] | high[1] << 8;
  for (int group = 0; group < 8; ++group, out += 32) {
    const int scale = (low[group / 2] >> (group % 2 * 4) & 15) | (tops >> (2 * group) & 3) << 4;
    const float dl = d * static_cast<float>(scale - 32);
    for_each_nibble(bytes + group * 16, [&](int i, int q) {
      out[i] = dl * static_cast<float>(kNonLinear[static_cast<size_t>(q)]);
    });
  }
}

// Four bits are a float of two bits of exponent and one of mantissa, doubled; the scale is a power
// of two, halved.
void decode_mxfp4(const std::byte* in, float* out) {
  constexpr std::array<float, 16> kTwice = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};
  BlockReader block(in);
  const float d = std::ldexp(1.0f, *block.take(1) - 128);
  for_each_nibble(block.take(16),
                  [&](int i, int q) { out[i] = d * kTwice[static_cast<size_t>(q)]; });
}

template <void (*kDecode)(const std::byte*, float*), int64_t kElements, int64_t kBytes>
void each_block(const std::byte* in, int64_t blocks, float* out) {
  for (int64_t i = 0; i < blocks; ++i) kDecode(in + i * kBytes, out + i * kElements);
}

constexpr GgmlType kGgmlTypes[] = {
    {0, "F32", 1, 4, decode_f32},
    {1, "F16", 1, 2, decode_f16},
    {2, "Q4_0", 32, 18, each_block<decode_q4_0, 32, 18>},
    {3, "Q4_1", 32, 20, each_block<decode_q4_1, 32, 20>},
    {6, "Q5_0", 32, 22, each_block<decode_q5_0, 32, 22>},
    {7, "Q5_1", 32, 24, each_block<decode_q5_1, 32, 24>},
    {8, "Q8_0", 32, 34, each_block<decode_q8_0, 32, 34>},
    {9, "Q8_1", 32, 40},
    {10, "Q2_K", 256, 84, each_block<decode_q2_k, 256, 84>},
    {11, "Q3_K", 256, 110, each_block<decode_q3_k, 256, 110>},
    {12, "Q4_K", 256, 144, each_block<decode_q4_k, 256, 144>},
    {13, "Q5_K", 256, 176, each_block<decode_q5_k, 256, 176>},
    {14, "Q6_K", 256, 210, each_block<decode_q6_k, 256, 210>},
    {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18, each_block<decode_iq4_nl, 32, 18>},
    {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136, each_block<decode_iq4_xs, 256, 136>},
    {24, "I8", 1, 1},
    {25, "I16", 1, 2},
    {26, "I32", 1, 4},
    {27, "I64", 1, 8},
    {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2, decode_bf16},
    {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},
    {39, "MXFP4", 32, 17, each_block<decode_mxfp4, 32, 17>},
    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
};

}  // namespace

const GgmlType* find_ggml_type(uint32_t id) {
  for (const GgmlType& type : kGgmlTypes)
    if (type.id == id) return &type;
  return nullptr;
}

const GgmlType* find_ggml_type(std::string_view name) {
  for (const GgmlType& type : kGgmlTypes)
    if (type.name == name) return &type;
  return nullptr;
}

std::string ggml_type_names() {
  std::string names;
  for (const GgmlType& type : kGgmlTypes) {
    if (type.decode == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += type.name;
  }
  return names;
}

}  // namespace megatron
