#include "megatron/dist_checkpointing/foreign/torch_archive.h"

#include <zlib.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/detail/io.h"

namespace megatron {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralEntry = 0x02014b50, kEnd = 0x06054b50,
                   kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
constexpr uint64_t kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20, kLocalBytes = 30,
                   kCentralBytes = 46;
constexpr uint64_t kMaxDirectoryBytes = uint64_t{64} << 20;
constexpr uint64_t kMaxPickleBytes = uint64_t{1} << 30;
constexpr uint64_t kAlignment = 64;  // of elements in the archive, as torch writes them

uint64_t little(std::string_view text, size_t at, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i)
    value |= uint64_t{static_cast<uint8_t>(text[at + i])} << (8 * i);
  return value;
}

void put(std::string& out, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

struct StorageType {
  std::string_view name;
  DType dtype;
};
constexpr StorageType kStorageTypes[] = {
    {"torch.FloatStorage", DType::kFloat32}, {"torch.BFloat16Storage", DType::kBFloat16},
    {"torch.HalfStorage", DType::kFloat16},  {"torch.DoubleStorage", DType::kFloat64},
    {"torch.LongStorage", DType::kInt64},    {"torch.IntStorage", DType::kInt32},
    {"torch.ShortStorage", DType::kInt16},   {"torch.CharStorage", DType::kInt8},
    {"torch.ByteStorage", DType::kUInt8},    {"torch.BoolStorage", DType::kBool}};

// Reads the fields of a directory, bounds-checked.
struct Reader {
  const InputFile& file;
  uint64_t begin, length;
  const std::string& what;

  void check(bool condition, std::string_view problem) const {
    MEGATRON_CHECK(condition, what, ": ", std::string(problem),
                   "\nhint: the file was cut short or damaged");
  }
  std::string read(uint64_t at, uint64_t bytes) const {
    check(at <= length && bytes <= length - at, "the archive points outside of itself");
    std::string out(bytes, '\0');
    file.read_at(begin + at, out.data(), bytes);
    return out;
  }
};

}  // namespace

uint32_t crc32_of(uint32_t before, const void* data, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

TorchArchive::TorchArchive(const InputFile& file, uint64_t begin, uint64_t length, std::string what)
    : file_(file), what_(std::move(what)) {
  MEGATRON_CHECK(begin <= file.size() && length <= file.size() - begin, what_, ": lies at bytes ",
                 begin, " to ", begin + length, " of ", file.path().string(), ", which has ",
                 file.size(), "\nhint: the file was cut short");
  const Reader reader{file, begin, length, what_};
  // The end record comes last; torch writes no comment after it.
  reader.check(length >= kEndBytes, "is no archive of torch.save");
  const uint64_t end_at = length - kEndBytes;
  const std::string end = reader.read(end_at, kEndBytes);
  reader.check(little(end, 0, 4) == kEnd && little(end, 20, 2) == 0, "is no archive of torch.save");
  uint64_t count = little(end, 10, 2), size = little(end, 12, 4), offset = little(end, 16, 4);
  if (end_at >= kLocator64Bytes) {
    const std::string locator = reader.read(end_at - kLocator64Bytes, kLocator64Bytes);
    if (little(locator, 0, 4) == kLocator64) {
      const std::string wide = reader.read(little(locator, 8, 8), kEnd64Bytes);
      reader.check(little(wide, 0, 4) == kEnd64, "the archive has no directory");
      count = little(wide, 32, 8);
      size = little(wide, 40, 8);
      offset = little(wide, 48, 8);
    }
  }
  reader.check(size <= kMaxDirectoryBytes && count <= size / kCentralBytes,
               "the archive's directory is too large");
  const std::string directory = reader.read(offset, size);
  size_t at = 0;
  for (uint64_t i = 0; i < count; ++i) {
    reader.check(
        directory.size() - at >= kCentralBytes && little(directory, at, 4) == kCentralEntry,
        "the archive's directory is cut short");
    const uint64_t method = little(directory, at + 10, 2),
                   name_bytes = little(directory, at + 28, 2),
                   extra_bytes = little(directory, at + 30, 2),
                   comment_bytes = little(directory, at + 32, 2);
    uint64_t packed = little(directory, at + 20, 4), bytes = little(directory, at + 24, 4),
             local = little(directory, at + 42, 4);
    reader.check(directory.size() - at - kCentralBytes >= name_bytes + extra_bytes + comment_bytes,
                 "the archive's directory is cut short");
    const std::string_view all(directory);
    const std::string_view name = all.substr(at + kCentralBytes, name_bytes),
                           extra = all.substr(at + kCentralBytes + name_bytes, extra_bytes);
    for (size_t e = 0; e + 4 <= extra.size();) {  // zip64 sizes
      const uint64_t id = little(extra, e, 2), field = little(extra, e + 2, 2);
      reader.check(field <= extra.size() - e - 4, "the archive's directory is cut short");
      size_t next = e + 4;
      const size_t field_end = next + field;
      const auto widen = [&](uint64_t& value) {
        if (id != 1 || value != 0xffffffff) return;
        reader.check(field_end - next >= 8, "the archive's directory is cut short");
        value = little(extra, next, 8);
        next += 8;
      };
      widen(bytes);
      widen(packed);
      widen(local);
      e = field_end;
    }
    checksums_.push_back(static_cast<uint32_t>(little(directory, at + 16, 4)));
    at += kCentralBytes + name_bytes + extra_bytes + comment_bytes;
    reader.check(method == 0 && packed == bytes,
                 "the archive is compressed, which torch.save does not do");
    const std::string head = reader.read(local, kLocalBytes);
    reader.check(little(head, 0, 4) == kLocalHeader,
                 "a member of the archive is not where its directory says");
    const uint64_t data = local + kLocalBytes + little(head, 26, 2) + little(head, 28, 2);
    reader.check(data <= length && bytes <= length - data, "a member of the archive is cut short");
    const size_t slash = name.find('/');
    members_.push_back(
        {std::string(slash == std::string_view::npos ? name : name.substr(slash + 1)), begin + data,
         bytes});
  }
  const Member* order = find("byteorder");
  if (order != nullptr && order->bytes < 16) {
    std::string text(order->bytes, '\0');
    file.read_at(order->offset, text.data(), text.size());
    MEGATRON_CHECK(text == "little", what_, ": its bytes are in the order \"", text,
                   "\", expected little");
  }
}

const TorchArchive::Member* TorchArchive::find(std::string_view name) const {
  for (const Member& member : members_)
    if (member.name == name) return &member;
  return nullptr;
}

Pickle TorchArchive::pickle(const Pickle::Known& known) const {
  const Member* member = find("data.pkl");
  MEGATRON_CHECK(member != nullptr, what_, ": the archive has no data.pkl");
  MEGATRON_CHECK(member->bytes <= kMaxPickleBytes, what_, ": data.pkl has ", member->bytes,
                 " bytes");
  std::vector<std::byte> bytes(member->bytes);
  file_.read_at(member->offset, bytes.data(), bytes.size());
  const uint32_t expected = checksums_[static_cast<size_t>(member - members_.data())];
  MEGATRON_CHECK(
      crc32_of(0, bytes.data(), bytes.size()) == expected, what_,
      ": the checksum of data.pkl does not match\nhint: the file was damaged after it was written");
  return Pickle(bytes, what_, known);
}

ArchivedTensor read_archived_tensor(const InputFile& file, uint64_t begin, uint64_t length,
                                    const std::string& what) {
  const TorchArchive archive(file, begin, length, what);
  const Pickle pickled = archive.pickle([](std::string_view name) {
    return name == "torch._utils._rebuild_tensor_v2" || name == "collections.OrderedDict" ||
           (name.starts_with("torch.") && name.ends_with("Storage"));
  });
  using Kind = PickleValue::Kind;
  const PickleValue& root = pickled.root();
  const auto check = [&](bool condition) {
    MEGATRON_CHECK(condition, what, ": holds no plain tensor, as torch.save writes it");
  };
  const auto integers = [&](const PickleValue* list) {
    check(list->is_sequence());
    std::vector<int64_t> out;
    for (const PickleValue* item : list->items) {
      check(item->is(Kind::kInt) && item->integer >= 0);
      out.push_back(item->integer);
    }
    return out;
  };
  check(root.is_object("torch._utils._rebuild_tensor_v2") && root.items.size() >= 4);
  check(root.items[0]->is(Kind::kPersistent) && root.items[0]->items[0]->is_sequence());
  const auto& storage = root.items[0]->items[0]->items;  // ("storage", type, key, device, elements)
  check(storage.size() == 5 && storage[1]->is(Kind::kName) && storage[2]->is(Kind::kText) &&
        storage[4]->is(Kind::kInt) && root.items[1]->is(Kind::kInt));
  const auto* type = std::find_if(std::begin(kStorageTypes), std::end(kStorageTypes),
                                  [&](const StorageType& t) { return t.name == storage[1]->text; });
  MEGATRON_CHECK(type != std::end(kStorageTypes), what, ": elements of a ", storage[1]->text,
                 " are not built");
  ArchivedTensor tensor;
  tensor.dtype = type->dtype;
  tensor.shape = integers(root.items[2]);
  const std::vector<int64_t> strides = integers(root.items[3]);
  check(strides.size() == tensor.shape.size() && tensor.shape.size() <= 8);
  int64_t elements = 1;
  for (size_t d = tensor.shape.size(); d-- > 0;) {
    MEGATRON_CHECK(tensor.shape[d] <= 1 || strides[d] == elements, what,
                   ": the tensor is not contiguous, which is not built");
    check(tensor.shape[d] == 0 || elements <= INT64_MAX / 16 / tensor.shape[d]);
    elements *= tensor.shape[d];
  }
  const TorchArchive::Member* data = archive.find("data/" + storage[2]->text);
  MEGATRON_CHECK(data != nullptr, what, ": the archive has no elements");
  const auto size = static_cast<uint64_t>(size_of(tensor.dtype));
  const auto first = static_cast<uint64_t>(root.items[1]->integer),
             count = static_cast<uint64_t>(elements);
  MEGATRON_CHECK(root.items[1]->integer >= 0 && first <= data->bytes / size &&
                     count <= data->bytes / size - first,
                 what, ": the tensor has ", elements, " elements, the archive only ",
                 data->bytes / size, "\nhint: the file was cut short or damaged");
  tensor.offset = data->offset + first * size;
  return tensor;
}

namespace {

std::string local_header(const std::string& name, uint32_t checksum, uint64_t bytes,
                         size_t extra_bytes) {
  std::string out;
  const bool wide = bytes >= 0xffffffff;
  put(out, kLocalHeader, 4);
  put(out, wide ? 45 : 20, 2);  // version needed
  put(out, 1 << 11, 2);         // names are UTF-8
  put(out, 0, 2);               // stored
  put(out, 0, 4);               // no time
  put(out, checksum, 4);
  put(out, wide ? 0xffffffff : bytes, 4);
  put(out, wide ? 0xffffffff : bytes, 4);
  put(out, name.size(), 2);
  put(out, extra_bytes, 2);
  return out + name;
}

struct ZipEntry {
  std::string name;
  uint64_t offset = 0, bytes = 0;
  uint32_t checksum = 0;
};

// An archive that is appended to.
struct Zip {
  std::string bytes;
  std::vector<ZipEntry> entries;

  void add(const std::string& name, const std::string& contents) {
    const std::string full = "archive/" + name;
    const uint32_t checksum = crc32_of(0, contents.data(), contents.size());
    entries.push_back({full, bytes.size(), contents.size(), checksum});
    bytes += local_header(full, checksum, contents.size(), 0) + contents;
  }
};

// The directory, which begins at `begin`.
std::string zip_end(const std::vector<ZipEntry>& entries, uint64_t begin) {
  std::string out;
  for (const ZipEntry& entry : entries) {
    const bool wide = entry.bytes >= 0xffffffff || entry.offset >= 0xffffffff;
    put(out, kCentralEntry, 4);
    put(out, 0, 2);
    put(out, wide ? 45 : 20, 2);
    put(out, 1 << 11, 2);
    put(out, 0, 2);
    put(out, 0, 4);
    put(out, entry.checksum, 4);
    put(out, wide ? 0xffffffff : entry.bytes, 4);
    put(out, wide ? 0xffffffff : entry.bytes, 4);
    put(out, entry.name.size(), 2);
    put(out, wide ? 28 : 0, 2);
    put(out, 0, 2);
    put(out, 0, 2);
    put(out, 0, 2);
    put(out, 0, 4);
    put(out, wide ? 0xffffffff : entry.offset, 4);
    out += entry.name;
    if (!wide) continue;
    put(out, 1, 2);
    put(out, 24, 2);
    put(out, entry.bytes, 8);
    put(out, entry.bytes, 8);
    put(out, entry.offset, 8);
  }
  const uint64_t size = out.size();
  put(out, kEnd64, 4);
  put(out, kEnd64Bytes - 12, 8);
  put(out, 45, 2);
  put(out, 45, 2);
  put(out, 0, 4);
  put(out, 0, 4);
  put(out, entries.size(), 8);
  put(out, entries.size(), 8);
  put(out, size, 8);
  put(out, begin, 8);
  put(out, kLocator64, 4);
  put(out, 0, 4);
  put(out, begin + size, 8);
  put(out, 1, 4);
  put(out, kEnd, 4);
  put(out, 0, 2);
  put(out, 0, 2);
  put(out, entries.size(), 2);
  put(out, entries.size(), 2);
  put(out, std::min<uint64_t>(size, 0xffffffff), 4);
  put(out, std::min<uint64_t>(begin, 0xffffffff), 4);
  put(out, 0, 2);
  return out;
}

std::string tensor_pickle(DType dtype, const std::vector<int64_t>& shape, int64_t elements) {
  const auto* type = std::find_if(std::begin(kStorageTypes), std::end(kStorageTypes),
                                  [&](const StorageType& t) { return t.dtype == dtype; });
  MEGATRON_ASSERT(type != std::end(kStorageTypes));
  std::vector<std::string> sizes, strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = pickle::integer(stride);
  for (const int64_t extent : shape) sizes.push_back(pickle::integer(extent));
  const std::string storage[] = {pickle::text("storage"),
                                 pickle::name("torch", type->name.substr(6)), pickle::text("0"),
                                 pickle::text("cpu"), pickle::integer(elements)};
  const std::string arguments[] = {pickle::persistent(pickle::tuple(storage)),
                                   pickle::integer(0),
                                   pickle::tuple(sizes),
                                   pickle::tuple(strides),
                                   pickle::boolean(false),
                                   pickle::call(pickle::name("collections", "OrderedDict"), {})};
  return pickle::file(pickle::call(pickle::name("torch._utils", "_rebuild_tensor_v2"), arguments));
}

}  // namespace

ArchiveFrame frame_of_tensor(DType dtype, const std::vector<int64_t>& shape, uint32_t checksum) {
  int64_t elements = 1;
  for (const int64_t extent : shape) elements *= extent;
  const auto bytes = static_cast<uint64_t>(elements * size_of(dtype));
  Zip zip;
  zip.add("data.pkl", tensor_pickle(dtype, shape, elements));
  zip.add("byteorder", "little");
  zip.add("version", "3\n");
  const std::string name = "archive/data/0";
  std::string extra;
  if (bytes >= 0xffffffff) {
    put(extra, 1, 2);
    put(extra, 16, 2);
    put(extra, bytes, 8);
    put(extra, bytes, 8);
  }
  // Padding in an extra field, so that the elements are aligned within the archive.
  const uint64_t before = zip.bytes.size() + kLocalBytes + name.size() + extra.size() + 4;
  const uint64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  extra += "FB";
  put(extra, padding, 2);
  extra.append(padding, 'Z');
  zip.entries.push_back({name, zip.bytes.size(), bytes, checksum});
  zip.bytes += local_header(name, checksum, bytes, extra.size()) + extra;
  return {zip.bytes, zip_end(zip.entries, zip.bytes.size() + bytes)};
}

std::string archive_of_pickle(const std::string& pickled) {
  Zip zip;
  zip.add("data.pkl", pickled);
  zip.add("byteorder", "little");
  zip.add("version", "3\n");
  return zip.bytes + zip_end(zip.entries, zip.bytes.size());
}

}  // namespace megatron
