#include "megatron/dist_checkpointing/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/detail/io.h"

namespace megatron {
namespace {

using nlohmann::json;

// Parses the header text; refuses duplicate names, which JSON parsers otherwise resolve silently,
// and deep nesting.
json parse_header_json(std::string_view text, std::string_view file) {
  std::vector<std::set<std::string>> names;
  const auto callback = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      MEGATRON_CHECK(depth < 4, file, ": the header nests deeper than a safetensors header can");
      names.resize(static_cast<size_t>(depth) + 1);
      names.back().clear();
    } else if (event == json::parse_event_t::key) {
      const std::string name = value.get<std::string>();
      MEGATRON_CHECK(names[static_cast<size_t>(depth) - 1].insert(name).second, file,
                     ": the header names \"", name, "\" twice");
    }
    return true;
  };
  try {
    return json::parse(text, callback);
  } catch (const json::exception& error) {
    throw_error(cat(file, ": the safetensors header is not JSON\ndetail: ", error.what()));
  }
}

uint64_t unsigned_value(const json& value, std::string_view file, const std::string& tensor) {
  MEGATRON_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= (uint64_t{1} << 62), file,
                 ": tensor \"", tensor, "\" has ",
                 value.dump(-1, ' ', true, json::error_handler_t::replace),
                 " where a number of bytes or elements is expected");
  return value.get<uint64_t>();
}

SafetensorsEntry parse_entry(const std::string& name, const json& value, std::string_view file) {
  MEGATRON_CHECK(value.is_object() && value.size() == 3 && value.contains("dtype") &&
                     value.contains("shape") && value.contains("data_offsets"),
                 file, ": tensor \"", name, "\" must have exactly dtype, shape and data_offsets");
  const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  MEGATRON_CHECK(dtype.is_string() && shape.is_array() && offsets.is_array() && offsets.size() == 2,
                 file, ": tensor \"", name, "\" has a malformed dtype, shape or data_offsets");
  SafetensorsEntry entry;
  entry.name = name;
  try {
    entry.dtype = dtype_from_string(dtype.get_ref<const std::string&>());
  } catch (const Error& error) {
    throw_error(cat(file, ": tensor \"", name, "\": ", error.what()));
  }
  MEGATRON_CHECK(shape.size() <= 64, file, ": tensor \"", name, "\" has ", shape.size(),
                 " dimensions");
  uint64_t bytes = static_cast<uint64_t>(size_of(entry.dtype));
  for (const json& extent : shape) {
    const uint64_t n = unsigned_value(extent, file, name);
    MEGATRON_CHECK(n == 0 || bytes <= (uint64_t{1} << 62) / n, file, ": tensor \"", name,
                   "\" has a shape that is too large");
    bytes *= n;
    entry.shape.push_back(static_cast<int64_t>(n));
  }
  entry.begin = unsigned_value(offsets[0], file, name);
  entry.end = unsigned_value(offsets[1], file, name);
  MEGATRON_CHECK(entry.begin <= entry.end && entry.end - entry.begin == bytes, file, ": tensor \"",
                 name, "\" needs ", bytes, " bytes by its shape and type, its data_offsets are ",
                 entry.begin, " and ", entry.end);
  return entry;
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, uint64_t file_bytes,
                                           std::string_view name) {
  MEGATRON_CHECK(file_bytes >= 8 && bytes.size() >= 8, name, ": is ", file_bytes,
                 " bytes long, too short for a safetensors file");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i)
    length = length << 8 | std::to_integer<uint64_t>(bytes[static_cast<size_t>(i)]);
  MEGATRON_CHECK(length <= kMaxSafetensorsHeaderBytes, name, ": claims a header of ", length,
                 " bytes; at most ", kMaxSafetensorsHeaderBytes, " are allowed");
  MEGATRON_CHECK(length <= file_bytes - 8 && length <= bytes.size() - 8, name,
                 ": claims a header of ", length, " bytes, the file has ", file_bytes);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, length);
  MEGATRON_CHECK(!text.empty() && text[0] == '{', name,
                 ": the safetensors header does not start with {");
  const json root = parse_header_json(text, name);
  SafetensorsHeader header;
  header.data_begin = 8 + length;
  header.data_bytes = file_bytes - header.data_begin;
  for (const auto& [key, value] : root.items()) {
    if (key != "__metadata__") {
      header.tensors.push_back(parse_entry(key, value, name));
      continue;
    }
    MEGATRON_CHECK(value.is_object(), name, ": __metadata__ is not an object");
    for (const auto& [meta_key, text_value] : value.items()) {
      MEGATRON_CHECK(text_value.is_string(), name, ": __metadata__ \"", meta_key,
                     "\" is not a string");
      header.metadata[meta_key] = text_value.get<std::string>();
    }
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
            });
  uint64_t expected = 0;
  for (const SafetensorsEntry& entry : header.tensors) {
    MEGATRON_CHECK(entry.begin == expected, name, ": tensor \"", entry.name, "\" begins at byte ",
                   entry.begin, " of the data, ",
                   entry.begin < expected ? "inside its predecessor, which ends at "
                                          : "after a gap from byte ",
                   expected);
    expected = entry.end;
  }
  MEGATRON_CHECK(expected == header.data_bytes, name, ": the tensors take ", expected,
                 " bytes, the file holds ", header.data_bytes,
                 " after its header\nhint: the file was cut short or something was appended");
  return header;
}

std::string encode_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return size_of(a.dtype) > size_of(b.dtype);
                   });
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root["__metadata__"] = metadata;
  std::string text = root.dump();
  text.pop_back();
  uint64_t offset = 0;
  std::set<std::string_view> names;
  for (SafetensorsEntry& entry : entries) {
    MEGATRON_CHECK(entry.name != "__metadata__" && names.insert(entry.name).second, "tensor \"",
                   entry.name, "\" is given twice, or has a name that the format reserves");
    uint64_t bytes = static_cast<uint64_t>(size_of(entry.dtype));
    for (int64_t extent : entry.shape) bytes *= static_cast<uint64_t>(extent);
    entry.begin = offset;
    entry.end = offset += bytes;
    const nlohmann::ordered_json value = {{"dtype", to_string(entry.dtype)},
                                          {"shape", entry.shape},
                                          {"data_offsets", {entry.begin, entry.end}}};
    if (text.size() > 1) text += ',';
    text += json(entry.name).dump() + ":" + value.dump();
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  MEGATRON_CHECK(text.size() <= kMaxSafetensorsHeaderBytes,
                 "the header of a safetensors file with ", entries.size(), " tensors would take ",
                 text.size(), " bytes; at most ", kMaxSafetensorsHeaderBytes, " are allowed");
  std::string prefix(8, '\0');
  for (size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(text.size() >> (8 * i));
  return prefix + text;
}

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path) {}
  InputFile file;
  SafetensorsHeader header;
  std::unordered_map<std::string_view, const SafetensorsEntry*> by_name;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : impl_(std::make_unique<Impl>(path)) {
  const InputFile& file = impl_->file;
  const std::string name = path.string();
  std::vector<std::byte> bytes(std::min<uint64_t>(8, file.size()));
  file.read_at(0, bytes.data(), bytes.size());
  uint64_t length = 0;
  for (size_t i = bytes.size(); i-- > 0;)
    length = length << 8 | std::to_integer<uint64_t>(bytes[i]);
  if (bytes.size() == 8 && length <= kMaxSafetensorsHeaderBytes && length <= file.size() - 8) {
    bytes.resize(8 + length);
    file.read_at(8, bytes.data() + 8, length);
  }
  impl_->header = parse_safetensors_header(bytes, file.size(), name);
  for (const SafetensorsEntry& entry : impl_->header.tensors) impl_->by_name[entry.name] = &entry;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

const std::filesystem::path& SafetensorsFile::path() const { return impl_->file.path(); }
const SafetensorsHeader& SafetensorsFile::header() const { return impl_->header; }

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = impl_->by_name.find(name);
  return found == impl_->by_name.end() ? nullptr : found->second;
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const SafetensorsEntry* found = find(name);
  MEGATRON_CHECK(found != nullptr, path().string(), ": has no tensor \"", name, "\"");
  return *found;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, void* out) const {
  read(entry, 0, entry.end - entry.begin, out);
}

void SafetensorsFile::read(const SafetensorsEntry& entry, uint64_t offset, uint64_t bytes,
                           void* out) const {
  const uint64_t size = entry.end - entry.begin;
  MEGATRON_CHECK(offset <= size && bytes <= size - offset, path().string(), ": tensor \"",
                 entry.name, "\" has ", size, " bytes; ", bytes, " were asked for at offset ",
                 offset);
  impl_->file.read_at(impl_->header.data_begin + entry.begin + offset, out, bytes);
}

void write_safetensors(const std::filesystem::path& path,
                       std::span<const SafetensorsTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, const void*> data;
  for (const SafetensorsTensor& tensor : tensors) {
    entries.push_back({tensor.name, tensor.dtype, tensor.shape});
    data[tensor.name] = tensor.data;
  }
  const std::string header = encode_safetensors_header(entries, metadata);
  AtomicFileWriter file(path);
  file.write(header);
  for (const SafetensorsEntry& entry : entries)
    if (entry.end > entry.begin) file.write(data.at(entry.name), entry.end - entry.begin);
  file.commit();
}

}  // namespace megatron
