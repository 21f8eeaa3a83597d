#include "megatron/dist_checkpointing/foreign/gguf_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/dist_checkpointing/detail/io.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "GGUF";
// Formats of llama.cpp before GGUF begin with these, in the byte order of files.
constexpr std::array<std::string_view, 4> kOlderMagics = {"lmgg", "fmgg", "tjgg", "algg"};
constexpr uint64_t kMostKeys = 1 << 16, kMostTensors = 1 << 17;
constexpr uint64_t kMostKeyName = 65535, kMostTensorName = 1024, kMostText = 1 << 20;
constexpr uint32_t kMostDimensions = 4;
constexpr uint64_t kLeastAlignment = 8, kMostAlignment = 1 << 20;
constexpr uint64_t kDefaultAlignment = 32;
constexpr const char* kAlignmentKey = "general.alignment";

struct TypeInfo {
  const char* name;
  uint64_t bytes;  // 0: of no fixed size
};
constexpr std::array<TypeInfo, 13> kValueTypes = {{{"UINT8", 1},
                                                   {"INT8", 1},
                                                   {"UINT16", 2},
                                                   {"INT16", 2},
                                                   {"UINT32", 4},
                                                   {"INT32", 4},
                                                   {"FLOAT32", 4},
                                                   {"BOOL", 1},
                                                   {"STRING", 0},
                                                   {"ARRAY", 0},
                                                   {"UINT64", 8},
                                                   {"INT64", 8},
                                                   {"FLOAT64", 8}}};

const TypeInfo& info_of(GgufType type) { return kValueTypes[static_cast<size_t>(type)]; }

bool is_integer(GgufType type) {
  return info_of(type).bytes > 0 && type != GgufType::kFloat32 && type != GgufType::kFloat64 &&
         type != GgufType::kBool;
}
bool is_number(GgufType type) { return info_of(type).bytes > 0 && type != GgufType::kBool; }

// Reads forward through a window. Throws Error "FILE: <what> at byte N: ..." at the file's end.
class Cursor {
 public:
  explicit Cursor(const InputFile& in) : in_(in) {}

  uint64_t at() const { return at_; }
  uint64_t left() const { return in_.size() - at_; }
  // What is being read, for messages, and where it began.
  void begin(std::string what) {
    what_ = std::move(what);
    begin_ = at_;
  }
  [[noreturn]] void fail(const std::string& problem) const {
    throw_error(cat(in_.path().string(), ": ", what_, " at byte ", begin_, ": ", problem));
  }
  template <class... Args>
  void check(bool condition, const Args&... problem) const {
    if (!condition) fail(cat(problem...));
  }

  template <class T>
  T take() {
    T value;
    read(&value, sizeof value);
    return value;
  }
  std::string text(uint64_t bytes) {
    need(bytes);
    std::string out(bytes, '\0');
    read(out.data(), bytes);
    return out;
  }
  void skip(uint64_t bytes) {
    need(bytes);
    at_ += bytes;
  }
  // Refuses a number of items that the rest of the file cannot hold.
  void need_items(uint64_t count, uint64_t least_bytes) const {
    check(count <= left() / least_bytes, "has ", count, " elements of at least ", least_bytes,
          " bytes, the file has ", left(), " more bytes");
  }

 private:
  void need(uint64_t bytes) const {
    check(bytes <= left(), "needs ", bytes, " bytes at byte ", at_, ", the file has ", left(),
          " more\nhint: the file was cut short, or is damaged");
  }
  void read(void* out, size_t bytes) {
    need(bytes);
    if (at_ < window_at_ || at_ + bytes > window_at_ + window_.size()) {
      constexpr uint64_t kWindow = 1 << 18;
      if (bytes > kWindow) {
        in_.read_at(at_, out, bytes);
        at_ += bytes;
        return;
      }
      window_.resize(std::min(kWindow, left()));
      in_.read_at(at_, window_.data(), window_.size());
      window_at_ = at_;
    }
    std::memcpy(out, window_.data() + (at_ - window_at_), bytes);
    at_ += bytes;
  }

  const InputFile& in_;
  uint64_t at_ = 0, window_at_ = 0, begin_ = 0;
  std::string what_, window_;
};

bool is_printable(std::string_view name) {
  return std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
}

std::string read_name(Cursor& cursor, uint64_t most) {
  const uint64_t length = cursor.take<uint64_t>();
  cursor.check(length > 0 && length <= most, "its name has ", length, " bytes, expected 1 to ",
               most);
  std::string name = cursor.text(length);
  cursor.check(is_printable(name), "its name holds bytes that are no printable ASCII");
  return name;
}

}  // namespace

struct GgufFile::Impl {
  explicit Impl(fs::path path) : in(std::move(path)) {}

  void read_header(Cursor& cursor);
  void read_key(Cursor& cursor, uint64_t number);
  void read_tensor(Cursor& cursor, uint64_t number);
  void place_tensors(uint64_t data_begin);

  const GgufValue* find(std::string_view key) const {
    const auto found = keys.find(key);
    return found == keys.end() ? nullptr : &found->second;
  }
  // The value if the key is there and, as `array` says, an array or not.
  const GgufValue* find(std::string_view key, bool array, bool (*fits)(GgufType),
                        const char* expected) const;
  std::string place(std::string_view key) const;
  // Element `i` of a value of numbers, given its bytes.
  template <class T>
  T number_at(const GgufValue& value, const char* bytes, uint64_t i) const;
  template <class T>
  std::optional<std::vector<T>> array(std::string_view key, uint64_t most, bool (*fits)(GgufType),
                                      const char* expected) const;
  void check_count(std::string_view key, const GgufValue& value, uint64_t most) const {
    MEGATRON_CHECK(value.count <= most, place(key), ": has ", value.count,
                   " elements, expected at most ", most);
  }

  InputFile in;
  uint32_t version = 0;
  uint64_t num_tensors = 0, num_keys = 0, alignment = kDefaultAlignment;
  std::map<std::string, GgufValue, std::less<>> keys;
  std::vector<GgufTensor> tensors;
  std::map<std::string_view, size_t> by_name;
};

std::string GgufFile::Impl::place(std::string_view key) const {
  const GgufValue* const value = find(key);
  return cat(in.path().string(), ": key ", key,
             value == nullptr ? std::string() : cat(" at byte ", value->offset));
}

void GgufFile::Impl::read_header(Cursor& cursor) {
  const std::string name = in.path().string();
  MEGATRON_CHECK(in.size() >= 24, name, ": is ", in.size(),
                 " bytes long, too short for a GGUF file");
  const std::string magic = cursor.text(4);
  if (std::find(kOlderMagics.begin(), kOlderMagics.end(), magic) != kOlderMagics.end())
    throw_error(cat(name, ": is in a format of llama.cpp from before GGUF, which is not built",
                    "\nhint: convert the model again with a current llama.cpp"));
  MEGATRON_CHECK(magic == kMagic, name, ": does not begin with \"GGUF\", so it is no GGUF file");
  version = cursor.take<uint32_t>();
  MEGATRON_CHECK((version & 0xffff) != 0 || version == 0, name,
                 ": is a big-endian GGUF file, which is not built",
                 "\nhint: convert the model for a little-endian machine");
  MEGATRON_CHECK(version != 1, name, ": is GGUF version 1, which is not built; expected 2 or 3",
                 "\nhint: convert the model again with a current llama.cpp");
  MEGATRON_CHECK(version == 2 || version == 3, name, ": is GGUF version ", version,
                 ", which is not known; expected 2 or 3");
  num_tensors = cursor.take<uint64_t>();
  num_keys = cursor.take<uint64_t>();
  MEGATRON_CHECK(num_keys <= kMostKeys, name, ": says that it has ", num_keys,
                 " keys, expected at most ", kMostKeys);
  MEGATRON_CHECK(num_tensors <= kMostTensors, name, ": says that it has ", num_tensors,
                 " tensors, expected at most ", kMostTensors);
}

void GgufFile::Impl::read_key(Cursor& cursor, uint64_t number) {
  cursor.begin(cat("key ", number, " of ", num_keys));
  std::string name = read_name(cursor, kMostKeyName);
  cursor.begin(cat("key ", name));
  const auto take_type = [&] {
    const uint32_t type = cursor.take<uint32_t>();
    cursor.check(type < kValueTypes.size(), "has type ", type, ", which is not known");
    return static_cast<GgufType>(type);
  };
  GgufValue value;
  value.type = take_type();
  value.is_array = value.type == GgufType::kArray;
  if (value.is_array) {
    value.type = take_type();
    cursor.check(value.type != GgufType::kArray, "is an array of arrays, which is not built");
    value.count = cursor.take<uint64_t>();
  }
  value.offset = cursor.at();
  const uint64_t element = info_of(value.type).bytes;
  cursor.need_items(value.count, element > 0 ? element : 8);
  if (element > 0) {
    cursor.skip(value.count * element);
  } else {
    for (uint64_t i = 0; i < value.count; ++i) cursor.skip(cursor.take<uint64_t>());
  }
  value.bytes = cursor.at() - value.offset;
  const auto [place, added] = keys.try_emplace(std::move(name), value);
  cursor.check(added, "there is another key of this name at byte ", place->second.offset);
}

void GgufFile::Impl::read_tensor(Cursor& cursor, uint64_t number) {
  cursor.begin(cat("tensor ", number, " of ", num_tensors));
  GgufTensor tensor;
  tensor.name = read_name(cursor, kMostTensorName);
  cursor.begin(cat("tensor ", tensor.name));
  const uint32_t dimensions = cursor.take<uint32_t>();
  cursor.check(dimensions >= 1 && dimensions <= kMostDimensions, "has ", dimensions,
               " dimensions, expected 1 to ", kMostDimensions);
  constexpr uint64_t kMostElements = uint64_t{1} << 50;
  uint64_t elements = 1;
  for (uint32_t d = 0; d < dimensions; ++d) {
    const uint64_t extent = cursor.take<uint64_t>();
    cursor.check(extent > 0 && extent <= kMostElements / elements, "dimension ", d, " is ", extent,
                 ", expected at least 1 and at most 2^50 elements in all");
    elements *= extent;
    tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(extent));
  }
  const uint32_t type = cursor.take<uint32_t>();
  tensor.type = find_ggml_type(type);
  cursor.check(tensor.type != nullptr, "has type ", type, ", which is not known");
  cursor.check(tensor.shape.back() % tensor.type->block == 0, "has rows of ", tensor.shape.back(),
               " elements, which are no whole blocks of ", tensor.type->block, " of its type ",
               tensor.type->name);
  tensor.bytes = elements / static_cast<uint64_t>(tensor.type->block) *
                 static_cast<uint64_t>(tensor.type->bytes);
  tensor.offset = cursor.take<uint64_t>();  // from the start of the data, which is not known yet
  cursor.check(tensor.offset % alignment == 0, "its data begin at offset ", tensor.offset,
               ", which is no multiple of the alignment ", alignment);
  tensors.push_back(std::move(tensor));
}

// Checks that the data of all tensors are inside the file and do not overlap.
void GgufFile::Impl::place_tensors(uint64_t data_begin) {
  for (GgufTensor& tensor : tensors) {
    const uint64_t data = in.size() > data_begin ? in.size() - data_begin : 0;
    MEGATRON_CHECK(tensor.offset <= data && tensor.bytes <= data - tensor.offset,
                   in.path().string(), ": tensor ", tensor.name, ": its ", tensor.bytes,
                   " bytes at offset ", tensor.offset, " lie outside the file, which has ", data,
                   " bytes of data\nhint: the file was cut short, or is damaged");
    tensor.offset += data_begin;
  }
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i)
    MEGATRON_CHECK(order[i - 1]->offset + order[i - 1]->bytes <= order[i]->offset,
                   in.path().string(), ": tensor ", order[i]->name, ": its data at byte ",
                   order[i]->offset, " overlap those of ", order[i - 1]->name,
                   ", which end at byte ", order[i - 1]->offset + order[i - 1]->bytes);
  for (size_t i = 0; i < tensors.size(); ++i)
    MEGATRON_CHECK(by_name.try_emplace(tensors[i].name, i).second, in.path().string(), ": tensor ",
                   tensors[i].name, " at byte ", tensors[i].offset,
                   ": there is another tensor of this name at byte ",
                   tensors[by_name[tensors[i].name]].offset);
}

GgufFile::GgufFile(fs::path path) : impl_(std::make_unique<Impl>(std::move(path))) {
  Cursor cursor(impl_->in);
  cursor.begin("the header");
  impl_->read_header(cursor);
  for (uint64_t i = 0; i < impl_->num_keys; ++i) impl_->read_key(cursor, i);
  if (const auto alignment = integer(kAlignmentKey)) {
    const auto given = static_cast<uint64_t>(*alignment);
    MEGATRON_CHECK(
        given >= kLeastAlignment && given <= kMostAlignment && (given & (given - 1)) == 0,
        place(kAlignmentKey), ": is ", *alignment, ", expected a power of two from ",
        kLeastAlignment, " to ", kMostAlignment);
    impl_->alignment = given;
  }
  for (uint64_t i = 0; i < impl_->num_tensors; ++i) impl_->read_tensor(cursor, i);
  const uint64_t mask = impl_->alignment - 1;
  impl_->place_tensors((cursor.at() + mask) & ~mask);
}

GgufFile::~GgufFile() = default;
GgufFile::GgufFile(GgufFile&&) noexcept = default;

const fs::path& GgufFile::path() const { return impl_->in.path(); }
int GgufFile::version() const { return static_cast<int>(impl_->version); }
const std::vector<GgufTensor>& GgufFile::tensors() const { return impl_->tensors; }
const std::map<std::string, GgufValue, std::less<>>& GgufFile::keys() const { return impl_->keys; }

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = impl_->by_name.find(name);
  return found == impl_->by_name.end() ? nullptr : &impl_->tensors[found->second];
}

const GgufValue* GgufFile::Impl::find(std::string_view key, bool array, bool (*fits)(GgufType),
                                      const char* expected) const {
  const GgufValue* const value = find(key);
  if (value == nullptr) return nullptr;
  MEGATRON_CHECK(value->is_array == array && fits(value->type), place(key), ": is ",
                 value->is_array ? "an array of " : "of type ", info_of(value->type).name,
                 ", expected ", expected);
  return value;
}

template <class T>
T GgufFile::Impl::number_at(const GgufValue& value, const char* bytes, uint64_t i) const {
  const auto as = [&](auto typed) {
    std::memcpy(&typed, bytes + i * sizeof typed, sizeof typed);
    return static_cast<T>(typed);
  };
  switch (value.type) {
    case GgufType::kUint8:
    case GgufType::kBool:
      return as(uint8_t{});
    case GgufType::kInt8:
      return as(int8_t{});
    case GgufType::kUint16:
      return as(uint16_t{});
    case GgufType::kInt16:
      return as(int16_t{});
    case GgufType::kUint32:
      return as(uint32_t{});
    case GgufType::kInt32:
      return as(int32_t{});
    case GgufType::kFloat32:
      return as(float{});
    case GgufType::kUint64:
      return as(uint64_t{});
    case GgufType::kInt64:
      return as(int64_t{});
    case GgufType::kFloat64:
      return as(double{});
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  MEGATRON_ASSERT(false, "not a number");
  return T{};
}

std::optional<int64_t> GgufFile::integer(std::string_view key) const {
  const GgufValue* const value = impl_->find(key, false, is_integer, "an integer");
  if (value == nullptr) return std::nullopt;
  char bytes[8];
  impl_->in.read_at(value->offset, bytes, value->bytes);
  const auto number = impl_->number_at<int64_t>(*value, bytes, 0);
  MEGATRON_CHECK(value->type != GgufType::kUint64 || number >= 0, place(key), ": is ",
                 static_cast<uint64_t>(number), ", expected less than 2^63");
  return number;
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const GgufValue* const value = impl_->find(key, false, is_number, "a number");
  if (value == nullptr) return std::nullopt;
  char bytes[8];
  impl_->in.read_at(value->offset, bytes, value->bytes);
  const auto number = impl_->number_at<double>(*value, bytes, 0);
  MEGATRON_CHECK(std::isfinite(number), place(key), ": is ", number, ", expected a finite number");
  return number;
}

std::optional<bool> GgufFile::boolean(std::string_view key) const {
  const GgufValue* const value =
      impl_->find(key, false, [](GgufType type) { return type == GgufType::kBool; }, "a boolean");
  if (value == nullptr) return std::nullopt;
  uint8_t byte = 0;
  impl_->in.read_at(value->offset, &byte, 1);
  MEGATRON_CHECK(byte <= 1, place(key), ": is ", int{byte}, ", expected 0 or 1");
  return byte == 1;
}

namespace {

bool is_text(GgufType type) { return type == GgufType::kString; }

void check_text(std::string_view text, const std::function<std::string()>& place) {
  MEGATRON_CHECK(is_valid_utf8(text), place(), ": is not UTF-8");
}

}  // namespace

std::optional<std::string> GgufFile::text(std::string_view key, uint64_t most_bytes) const {
  const GgufValue* const value = impl_->find(key, false, is_text, "a text");
  if (value == nullptr) return std::nullopt;
  const uint64_t bytes = value->bytes - 8;
  MEGATRON_CHECK(bytes <= most_bytes, place(key), ": is ", bytes, " bytes long, expected at most ",
                 most_bytes);
  std::string out(bytes, '\0');
  impl_->in.read_at(value->offset + 8, out.data(), out.size());
  check_text(out, [&] { return place(key); });
  return out;
}

template <class T>
std::optional<std::vector<T>> GgufFile::Impl::array(std::string_view key, uint64_t most,
                                                    bool (*fits)(GgufType),
                                                    const char* expected) const {
  const GgufValue* const value = find(key, true, fits, expected);
  if (value == nullptr) return std::nullopt;
  check_count(key, *value, most);
  std::string bytes(value->bytes, '\0');
  in.read_at(value->offset, bytes.data(), bytes.size());
  std::vector<T> out(value->count);
  for (uint64_t i = 0; i < value->count; ++i) out[i] = number_at<T>(*value, bytes.data(), i);
  return out;
}

std::optional<std::vector<int64_t>> GgufFile::integers(std::string_view key, uint64_t most) const {
  return impl_->array<int64_t>(
      key, most, [](GgufType type) { return is_integer(type) || type == GgufType::kBool; },
      "an array of integers");
}

std::optional<std::vector<double>> GgufFile::numbers(std::string_view key, uint64_t most) const {
  return impl_->array<double>(key, most, is_number, "an array of numbers");
}

std::optional<std::vector<std::string>> GgufFile::texts(std::string_view key, uint64_t most) const {
  const GgufValue* const value = impl_->find(key, true, is_text, "an array of texts");
  if (value == nullptr) return std::nullopt;
  impl_->check_count(key, *value, most);
  std::vector<std::string> out;
  out.reserve(value->count);
  Cursor cursor(impl_->in);
  cursor.skip(value->offset);
  for (uint64_t i = 0; i < value->count; ++i) {
    const auto where = [&] { return cat(place(key), ": element ", i); };
    const auto length = cursor.take<uint64_t>();
    MEGATRON_CHECK(length <= kMostText, where(), " is ", length, " bytes long, expected at most ",
                   kMostText);
    out.push_back(cursor.text(length));
    check_text(out.back(), where);
  }
  return out;
}

std::string GgufFile::place(std::string_view key) const { return impl_->place(key); }
std::string GgufFile::place(const GgufTensor& tensor) const {
  return cat(path().string(), ": tensor ", tensor.name, " at byte ", tensor.offset);
}

void GgufFile::read_at(uint64_t offset, void* out, size_t bytes) const {
  impl_->in.read_at(offset, out, bytes);
}

bool is_gguf_file(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return false;
  if (path.extension() == ".gguf") return true;
  const InputFile in(path);
  if (in.size() < kMagic.size()) return false;
  std::string magic(kMagic.size(), '\0');
  in.read_at(0, magic.data(), magic.size());
  return magic == kMagic;
}

}  // namespace megatron
