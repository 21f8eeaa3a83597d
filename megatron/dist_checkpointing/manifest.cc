#include "megatron/dist_checkpointing/manifest.h"

#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/detail/geometry.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::string_view kTrailerBegin = "\"manifest_xxh3_128\": \"";
constexpr std::string_view kTrailerEnd = "\"\n}\n";
constexpr size_t kMaxDimensions = 64;
constexpr size_t kMaxNameBytes = 4096;
// Limit of comparisons of one tensor's parts; a real tensor has a part per rank, few of which are
// adjacent.
constexpr int64_t kMaxComparisons = int64_t{1} << 23;
constexpr size_t kTrailerBytes = kTrailerBegin.size() + 32 + kTrailerEnd.size();

uint64_t from_hex(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  MEGATRON_CHECK(text.size() == 16 && error == std::errc() && end == text.data() + text.size(),
                 "\"", text, "\" is not a checksum of 16 hexadecimal digits");
  return value;
}

std::string trailer_of(std::string_view body) {
  const XXH128_hash_t hash = XXH3_128bits(body.data(), body.size());
  return cat(kTrailerBegin, format_hex(hash.high64), format_hex(hash.low64), kTrailerEnd);
}

std::string encode_file(const StoredFile& file) {
  std::string blocks;
  for (uint64_t hash : file.block_hashes) blocks += format_hex(hash);
  return ordered_json{{"name", file.name},
                      {"bytes", file.bytes},
                      {"header_bytes", file.header_bytes},
                      {"header_xxh3", format_hex(file.header_hash)},
                      {"block_xxh3", blocks}}
      .dump();
}

std::string encode_tensor(const StoredTensor& tensor) {
  ordered_json fragments = ordered_json::array();
  for (const Fragment& fragment : tensor.fragments) {
    ordered_json item = {{"file", fragment.file},
                         {"offset", fragment.offset},
                         {"box", {fragment.box.offset, fragment.box.shape}}};
    if (fragment.flat_begin != 0 || fragment.flat_end != fragment.box.num_elements())
      item["flat"] = {fragment.flat_begin, fragment.flat_end};
    fragments.push_back(std::move(item));
  }
  return ordered_json{
      {"dtype", to_string(tensor.dtype)}, {"shape", tensor.shape}, {"fragments", fragments}}
      .dump();
}

// Refuses input that our writers never produce and that could overflow a reader's stack: deep
// nesting, duplicate names.
class StrictReader {
 public:
  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      MEGATRON_CHECK(depth < kMaxDepth, "is nested more than ", kMaxDepth, " deep");
      if (event == json::parse_event_t::object_start) names_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      names_.pop_back();
    } else if (event == json::parse_event_t::key) {
      const std::string& name = parsed.get_ref<const std::string&>();
      MEGATRON_CHECK(names_.back().insert(name).second, "gives \"", name.substr(0, kShownBytes),
                     "\" twice");
    }
    return true;
  }

 private:
  static constexpr int kMaxDepth = 64;
  static constexpr size_t kShownBytes = 200;
  std::vector<std::set<std::string>> names_;  // names in the objects that are open
};

// An integer that fits; the library would silently convert fractions and signs.
int64_t integer(const json& value, const char* what) {
  MEGATRON_CHECK(value.is_number_integer() &&
                     (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX}),
                 what, " is ", value.dump().substr(0, 40), ", expected a whole number below 2^63");
  return value.get<int64_t>();
}

uint64_t natural(const json& value, const char* what) {
  const int64_t number = integer(value, what);
  MEGATRON_CHECK(number >= 0, what, " is ", number, ", expected at least 0");
  return static_cast<uint64_t>(number);
}

std::vector<int64_t> integers(const json& value, const char* what) {
  MEGATRON_CHECK(value.is_array() && value.size() <= kMaxDimensions, what,
                 " is no list of at most ", kMaxDimensions, " numbers");
  std::vector<int64_t> numbers;
  for (const json& item : value) numbers.push_back(integer(item, what));
  return numbers;
}

StoredFile decode_file(const json& value) {
  StoredFile file;
  file.name = value.at("name").get<std::string>();
  MEGATRON_CHECK(file.name.size() <= kMaxNameBytes, "a file has a name of ", file.name.size(),
                 " bytes");
  file.bytes = natural(value.at("bytes"), "the size of a file");
  file.header_bytes = natural(value.at("header_bytes"), "the header of a file");
  file.header_hash = from_hex(value.at("header_xxh3").get<std::string>());
  const std::string blocks = value.at("block_xxh3").get<std::string>();
  for (size_t i = 0; i < blocks.size(); i += 16)
    file.block_hashes.push_back(from_hex(std::string_view(blocks).substr(i, 16)));
  return file;
}

StoredTensor decode_tensor(const json& value) {
  StoredTensor tensor;
  tensor.dtype = dtype_from_string(value.at("dtype").get<std::string>());
  tensor.shape = integers(value.at("shape"), "its shape");
  for (const json& item : value.at("fragments")) {
    Fragment fragment;
    const int64_t file = integer(item.at("file"), "the file of a fragment");
    MEGATRON_CHECK(file >= 0 && file < INT_MAX, "a fragment lies in file ", file);
    fragment.file = static_cast<int>(file);
    fragment.offset = natural(item.at("offset"), "the offset of a fragment");
    fragment.box.offset = integers(item.at("box").at(0), "the box of a fragment");
    fragment.box.shape = integers(item.at("box").at(1), "the box of a fragment");
    fragment.flat_end = checked_num_elements(fragment.box.shape, "a fragment");
    if (item.contains("flat")) {
      fragment.flat_begin = integer(item["flat"].at(0), "the range of a fragment");
      fragment.flat_end = integer(item["flat"].at(1), "the range of a fragment");
    }
    tensor.fragments.push_back(std::move(fragment));
  }
  return tensor;
}

Manifest decode(std::string_view text) {
  const json root = json::parse(text, StrictReader());
  MEGATRON_CHECK(root.at("format") == "megatron-checkpoint", "its format is ",
                 root.at("format").dump(), ", expected \"megatron-checkpoint\"");
  const int64_t version = integer(root.at("format_version"), "its format_version");
  MEGATRON_CHECK(version == kCheckpointFormatVersion, "was written in format version ", version,
                 "; this program reads version ", kCheckpointFormatVersion);
  MEGATRON_CHECK(natural(root.at("block_bytes"), "its block_bytes") == kCheckpointBlockBytes,
                 "has checksums per ", root.at("block_bytes").dump(),
                 " bytes; this program reads blocks of ", kCheckpointBlockBytes);
  Manifest manifest;
  manifest.iteration = integer(root.at("iteration"), "its iteration");
  manifest.created = root.at("created").get<std::string>();
  MEGATRON_CHECK(root.at("state").is_object(), "state is not an object");
  manifest.state = root.at("state").dump();
  MEGATRON_CHECK(root.at("files").is_array() && root.at("tensors").is_object(),
                 "files are no list or tensors no object");
  for (const json& file : root.at("files")) manifest.files.push_back(decode_file(file));
  for (const auto& [key, tensor] : root.at("tensors").items()) {
    MEGATRON_CHECK(key.size() <= kMaxNameBytes, "a tensor has a name of ", key.size(), " bytes");
    try {
      manifest.tensors[key] = decode_tensor(tensor);
    } catch (const std::exception& error) {
      throw Error(cat("tensor ", key, ": ", error.what()));
    }
  }
  return manifest;
}

void check_file(const StoredFile& file) {
  const std::filesystem::path path(file.name);
  MEGATRON_CHECK(
      !file.name.empty() && path.is_relative() && file.name.find('\\') == std::string::npos, "\"",
      file.name, "\" is no name of a file inside the checkpoint");
  for (const auto& part : path)
    MEGATRON_CHECK(part != ".." && part != "." && !part.empty(), "\"", file.name,
                   "\" is no name of a file inside the checkpoint");
  MEGATRON_CHECK(path.lexically_normal().string() == file.name, "\"", file.name,
                 "\" is no name of a file inside the checkpoint");
  MEGATRON_CHECK(
      file.header_bytes <= file.bytes && file.header_bytes <= kMaxSafetensorsHeaderBytes + 8,
      file.name, " has a header of ", file.header_bytes, " bytes and ", file.bytes,
      " bytes in all");
  const uint64_t data = file.bytes - file.header_bytes;
  const uint64_t blocks = data / kCheckpointBlockBytes + (data % kCheckpointBlockBytes != 0);
  MEGATRON_CHECK(!file.has_checksums || file.block_hashes.size() == blocks, file.name, " has ",
                 file.block_hashes.size(), " checksums for ", blocks, " blocks");
}

// Number of elements that two fragments of one tensor share.
int64_t shared_elements(const Fragment& a, const Fragment& b) {
  const std::vector<int64_t> origin(a.box.shape.size(), 0);
  return Overlap(a.box, a.flat_begin, a.flat_end, b.box.shape, {b.box, origin}, b.flat_begin,
                 b.flat_end)
      .count();
}

// Fragments must not overlap. Sorted by box, so that only those adjacent in the first dimension are
// compared.
void check_disjoint(const StoredTensor& tensor) {
  std::vector<const Fragment*> sorted;
  for (const Fragment& fragment : tensor.fragments)
    if (fragment.flat_begin < fragment.flat_end) sorted.push_back(&fragment);
  std::sort(sorted.begin(), sorted.end(), [](const Fragment* a, const Fragment* b) {
    return std::tie(a->box.offset, a->box.shape, a->flat_begin) <
           std::tie(b->box.offset, b->box.shape, b->flat_begin);
  });
  // Start of the next box: a part is compared only with the part of the same box that follows it.
  std::vector<size_t> next_box(sorted.size(), sorted.size());
  for (size_t i = sorted.size(); i-- > 1;)
    next_box[i - 1] = sorted[i]->box == sorted[i - 1]->box ? next_box[i] : i;
  int64_t comparisons = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const Fragment& a = *sorted[i];
    for (size_t j = i + 1; j < sorted.size(); ++j) {
      const Fragment& b = *sorted[j];
      MEGATRON_CHECK(++comparisons <= kMaxComparisons, "its ", sorted.size(),
                     " parts lie side by side; so many cannot be compared");
      if (!a.box.offset.empty() && b.box.offset[0] >= a.box.offset[0] + a.box.shape[0]) break;
      if (a.box == b.box) {
        // Within one box flat ranges increase: once one begins after `a`, all later ones do.
        MEGATRON_CHECK(b.flat_begin >= a.flat_end, "elements of the box at ",
                       shape_string(a.box.offset), " are given twice");
        j = next_box[j] - 1;
        continue;
      }
      const std::optional<Box> common = intersect(a.box, b.box);
      if (!common) continue;
      const int64_t rows = common->num_elements() /
                           std::max<int64_t>(1, common->shape.empty() ? 1 : common->shape.back());
      comparisons += std::min(rows, kMaxComparisons);
      MEGATRON_CHECK(comparisons <= kMaxComparisons, "its ", sorted.size(),
                     " parts overlap; so many cannot be compared");
      MEGATRON_CHECK(shared_elements(a, b) == 0, "elements of the boxes at ",
                     shape_string(a.box.offset), " and ", shape_string(b.box.offset),
                     " are given twice");
    }
  }
}

void check_tensor(const StoredTensor& tensor, const std::vector<StoredFile>& files) {
  const int64_t total = checked_num_elements(tensor.shape, "it");
  const uint64_t element_bytes = static_cast<uint64_t>(size_of(tensor.dtype));
  int64_t covered = 0;
  for (const Fragment& fragment : tensor.fragments) {
    MEGATRON_CHECK(fragment.file >= 0 && static_cast<size_t>(fragment.file) < files.size(),
                   "a fragment lies in file ", fragment.file, " of ", files.size());
    const StoredFile& file = files[static_cast<size_t>(fragment.file)];
    MEGATRON_CHECK(is_inside(fragment.box, tensor.shape), "a fragment at ",
                   shape_string(fragment.box.offset), " of shape ",
                   shape_string(fragment.box.shape), " lies outside the shape ",
                   shape_string(tensor.shape));
    MEGATRON_CHECK(fragment.flat_begin >= 0 && fragment.flat_begin <= fragment.flat_end &&
                       fragment.flat_end <= fragment.box.num_elements(),
                   "a fragment has the flat range ", fragment.flat_begin, " to ", fragment.flat_end,
                   " of ", fragment.box.num_elements(), " elements");
    uint64_t bytes = static_cast<uint64_t>(fragment.flat_end - fragment.flat_begin) * element_bytes;
    if (fragment.is_strided() && bytes > 0) {
      const std::vector<int64_t>& extents = fragment.box.shape;
      const size_t rows = extents.size() - 2, columns = rows + 1;     // others have one element
      const size_t inner = fragment.row_stride > 0 ? columns : rows;  // the contiguous dimension
      const int64_t stride = fragment.row_stride + fragment.column_stride;
      MEGATRON_CHECK(extents.size() >= 2 && (extents[inner] - 1) * fragment.step < stride &&
                         extents[rows] * extents[columns] == fragment.box.num_elements() &&
                         (fragment.row_stride == 0 || fragment.column_stride == 0) &&
                         fragment.flat_end - fragment.flat_begin == fragment.box.num_elements(),
                     "a fragment with a stride is no whole part of a matrix");
      bytes = static_cast<uint64_t>(stride * (extents[rows + columns - inner] - 1) +
                                    fragment.step * (extents[inner] - 1) + 1) *
              element_bytes;
    }
    const uint64_t data = file.bytes - file.header_bytes;
    const bool aligned = fragment.offset % element_bytes == 0 || !file.has_checksums;
    MEGATRON_CHECK(aligned && fragment.offset <= data && bytes <= data - fragment.offset,
                   "a fragment of ", bytes, " bytes at ", fragment.offset,
                   " does not fit into the ", data, " data bytes of ", file.name);
    covered += fragment.flat_end - fragment.flat_begin;
    MEGATRON_CHECK(covered <= total, "its fragments hold more than its ", total, " elements");
  }
  MEGATRON_CHECK(covered == total, "its fragments hold ", covered, " of its ", total,
                 " elements of shape ", shape_string(tensor.shape),
                 "\nhint: a rank that holds a part of it did not write");
  check_disjoint(tensor);
}

}  // namespace

std::string encode_manifest(const Manifest& manifest) {
  const auto separated = [](std::string& text, bool& first) {
    text += first ? "\n" : ",\n";
    first = false;
  };
  std::string text = "{\n\"format\": \"megatron-checkpoint\",\n";
  text += cat("\"format_version\": ", kCheckpointFormatVersion,
              ",\n\"iteration\": ", manifest.iteration,
              ",\n\"created\": ", json(manifest.created).dump(),
              ",\n\"block_bytes\": ", kCheckpointBlockBytes, ",\n");
  json state;
  try {
    state = json::parse(manifest.state);
  } catch (const json::exception& error) {
    throw_error(cat("the state given to a checkpoint is not JSON\ndetail: ", error.what()));
  }
  MEGATRON_CHECK(state.is_object(), "the state given to a checkpoint is not a JSON object");
  text += "\"state\": " + state.dump() + ",\n\"files\": [";
  bool first = true;
  for (const StoredFile& file : manifest.files) {
    separated(text, first);
    text += encode_file(file);
  }
  text += "\n],\n\"tensors\": {";
  first = true;
  for (const auto& [key, tensor] : manifest.tensors) {
    separated(text, first);
    text += json(key).dump() + ": " + encode_tensor(tensor);
  }
  text += "\n},\n";
  return text + trailer_of(text);
}

void check_manifest(const Manifest& manifest, std::string_view name) {
  std::string part;
  try {
    std::map<std::string_view, int> names;
    for (const StoredFile& file : manifest.files) {
      check_file(file);
      MEGATRON_CHECK(++names[file.name] == 1, "file ", file.name, " is listed twice");
    }
    for (const auto& [key, tensor] : manifest.tensors) {
      part = cat("tensor ", key, ": ");
      check_tensor(tensor, manifest.files);
    }
  } catch (const Error& error) {
    throw Error(cat(name, ": ", part, error.what()));
  }
}

Manifest parse_manifest(std::string_view text, std::string_view name, bool complete) {
  MEGATRON_CHECK(text.size() > kTrailerBytes, name, ": is ", text.size(),
                 " bytes long and holds no manifest");
  const std::string_view body = text.substr(0, text.size() - kTrailerBytes);
  MEGATRON_CHECK(text.substr(body.size()) == trailer_of(body), name,
                 ": its checksum does not match its contents\nhint: the file was cut short or "
                 "changed after it was written");
  Manifest manifest;
  try {
    manifest = decode(text);
  } catch (const std::exception& error) {
    throw_error(cat(name, ": ", error.what()));
  }
  if (complete) check_manifest(manifest, name);
  return manifest;
}

}  // namespace megatron
