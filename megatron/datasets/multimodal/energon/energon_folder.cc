#include "megatron/datasets/multimodal/energon/energon_folder.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/datasets/multimodal/energon/braces.h"
#include "megatron/datasets/multimodal/energon/energon_meta.h"
#include "megatron/datasets/multimodal/yaml_json.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t kMostMetaBytes = uint64_t{64} << 20;
constexpr int64_t kMostSamples = int64_t{1} << 40;  // of a shard

fs::path meta_of(const fs::path& folder) { return folder / ".nv-meta"; }

// The first of the files that there is, or the one that is named.
fs::path meta_file(const fs::path& meta, const std::string& named,
                   std::initializer_list<const char*> names) {
  if (!named.empty()) {
    MEGATRON_CHECK(fs::path(named).is_relative() && named.find("..") == std::string::npos &&
                       fs::is_regular_file(meta / named),
                   meta.string(), ": has no file ", named);
    return meta / named;
  }
  for (const char* name : names)
    if (fs::exists(meta / name)) return meta / name;
  throw_error(cat(meta.string(), ": has no ", *names.begin(), "\nhint: energon prepare writes it"));
}

// -- fields

// "json[0][value]" -> json, 0, value
FieldPath field_path(const std::string& text, const std::string& where) {
  FieldPath out;
  size_t at = std::min(text.find('['), text.size());
  out.push_back(text.substr(0, at));
  while (at < text.size()) {
    const size_t end = text.find(']', at);
    const bool fits = text[at] == '[' && end != std::string::npos && end > at + 1;
    MEGATRON_CHECK(fits && !out[0].empty(), where, ": the place ", text,
                   " of a field is none\nhint: EXTENSION, or json[KEY][NUMBER]");
    out.push_back(text.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return out;
}

std::vector<FieldPath> field_paths(const std::string& text, const std::string& where) {
  std::vector<FieldPath> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    out.push_back(field_path(text.substr(begin, end - begin), where));
    begin = end + 1;
  }
  return out;
}

const std::vector<EnergonType>& energon_types() {
  static const std::vector<EnergonType> kTypes = {
      {"CaptioningSample", {"caption", "image"}, {}},
      {"VQASample", {"answers", "context", "image"}, {"answer_weights"}},
      {"OCRSample", {"image", "text"}, {}},
      {"InterleavedSample", {"sequence"}, {}},
      {"SimilarityInterleavedSample", {"images", "matched_text_indices", "texts"}, {}},
      {"ImageSample", {"image"}, {}, false},
      {"TextSample", {"text"}, {}, false}};
  return kTypes;
}

// "captioning.CaptioningWebdataset" of older folders is of CaptioningSample.
std::string sample_type_of(const json& meta, const std::string& where) {
  const json& type = meta.contains("sample_type") ? meta["sample_type"] : meta;
  MEGATRON_CHECK(type.is_object() && type.contains("__class__") && type["__class__"].is_string(),
                 where, ": says no sample_type.__class__");
  std::string name = type["__class__"];
  for (const char* loader : {"sample_loader", "part_filter"})
    MEGATRON_CHECK(
        !meta.contains(loader), where, ": has a ", loader,
        ", a program that makes samples, which is not run\nhint: a field_map says where ",
        "the fields lie");
  constexpr std::string_view kOld = "Webdataset";
  if (name.ends_with(kOld)) name.replace(name.size() - kOld.size(), kOld.size(), "Sample");
  return name;
}

void read_fields(const json& meta, const std::string& where, EnergonFolder& out) {
  const EnergonType& type = *out.type;
  MEGATRON_CHECK(meta.contains("field_map") && meta["field_map"].is_object(), where,
                 ": has no field_map");
  std::set<std::string> known = type.fields;
  known.insert(type.optional.begin(), type.optional.end());
  for (const auto& [name, place] : meta["field_map"].items()) {
    MEGATRON_CHECK(known.contains(name), where, ": the field ", name, " of ", type.name,
                   " is not read\nhint: the fields that are read are ", listed(known));
    MEGATRON_CHECK(place.is_string(), where, ": field_map of ", name, " is no text");
    out.fields[name] = field_paths(place, where);
  }
  for (const std::string& name : type.fields)
    MEGATRON_CHECK(out.fields.contains(name), where, ": field_map has no ", name);
}

// -- parts

std::vector<std::string> names_of(const json& list, const std::string& where) {
  std::vector<std::string> out;
  MEGATRON_CHECK(list.is_array(), where, " is no list");
  for (const json& name : list) {
    MEGATRON_CHECK(name.is_string(), where, " has ", name.dump(), ", no text");
    try {
      for (std::string& one : expanded_braces(name)) out.push_back(std::move(one));
    } catch (const Error& error) {
      throw_error(cat(where, ": ", error.what()));
    }
  }
  return out;
}

void read_parts(const fs::path& meta, const fs::path& split_file, EnergonFolder& out) {
  const json split = read_energon_meta(split_file);
  const std::string where = split_file.string();
  MEGATRON_CHECK(
      split.is_object() && split.contains("split_parts") && split["split_parts"].is_object(), where,
      ": has no split_parts");
  const std::vector<std::string> excluded =
      split.contains("exclude") && !split["exclude"].is_null()
          ? names_of(split["exclude"], cat(where, ": exclude"))
          : std::vector<std::string>();
  MEGATRON_CHECK(split["split_parts"].contains(out.part), where, ": split_parts has no ", out.part);
  const fs::path info_file = meta_file(meta, "", {".info.json", ".info.yaml"});
  const json info = read_energon_meta(info_file);
  MEGATRON_CHECK(
      info.is_object() && info.contains("shard_counts") && info["shard_counts"].is_object(),
      info_file.string(), ": has no shard_counts");
  for (const std::string& name :
       names_of(split["split_parts"][out.part], cat(where, ": split_parts of ", out.part))) {
    if (std::ranges::find(excluded, name) != excluded.end()) continue;
    const fs::path shard = fs::path(out.path) / name;
    MEGATRON_CHECK(!fs::path(name).is_absolute() && name.find("..") == std::string::npos, where,
                   ": the shard ", name, " leaves the folder");
    MEGATRON_CHECK(fs::exists(shard), where, ": there is no shard ", shard.string());
    const json& counts = info["shard_counts"];
    MEGATRON_CHECK(counts.contains(name) && counts[name].is_number_integer() && counts[name] >= 0 &&
                       counts[name] <= kMostSamples,
                   info_file.string(), ": shard_counts has no number of ", name);
    out.shards.push_back(shard.string());
    out.counts.push_back(counts[name].get<int64_t>());
  }
  MEGATRON_CHECK(!out.shards.empty(), where, ": split_parts of ", out.part, " has no shards",
                 out.part == "train" ? "" : "\nhint: without validation and test, --eval-iters 0");
  for (const std::string& name : excluded)
    if (const size_t slash = name.find(".tar/"); slash != std::string::npos)
      out.excluded.insert((fs::path(out.path) / name).string());
}

}  // namespace

json read_energon_meta(const fs::path& file) {
  return json::parse(yaml_to_json(read_file(file, kMostMetaBytes), file.string()));
}

const EnergonType& energon_type(const std::string& name, const std::string& where) {
  for (const EnergonType& type : energon_types())
    if (name == type.name) return type;
  throw_error(cat(where, ": samples of type ", name,
                  " are not built\nhint: ", listed(energon_types(), &EnergonType::name), " are"));
}

bool is_energon_folder(const std::string& path) {
  std::error_code error;
  return fs::exists(meta_of(path) / "dataset.yaml", error) ||
         fs::exists(meta_of(path) / ".info.json", error);
}

std::shared_ptr<const EnergonFolder> read_energon_folder(const EnergonRequest& request) {
  auto out = std::make_shared<EnergonFolder>();
  out->path = request.path;
  out->part = request.part;
  const fs::path meta = meta_of(request.path);
  const fs::path file = meta_file(meta, request.dataset_file, {"dataset.yaml", "dataset.yml"});
  const json dataset = read_energon_meta(file);
  MEGATRON_CHECK(dataset.is_object(), file.string(), ": is no list of names and values");
  out->type = &energon_type(sample_type_of(dataset, file.string()), file.string());
  read_fields(dataset, file.string(), *out);
  read_parts(meta, meta_file(meta, request.split_file, {"split.yaml", "split.json"}), *out);
  json excluded = json::array();
  for (const std::string& name : out->excluded) excluded.push_back(name.substr(out->path.size()));
  out->description = json{
      {"type", out->type->name},
      {"fields", dataset["field_map"]},
      {"part", out->part},
      {"excluded",
       excluded}}.dump();
  return out;
}

EnergonShard read_energon_shard(const EnergonFolder& folder, size_t shard) {
  const std::string& path = folder.shards[shard];
  EnergonShard out{MappedFile(path), {}};
  out.samples = group_members(read_tar(out.file.bytes(), path), path);
  MEGATRON_CHECK(std::ssize(out.samples) == folder.counts[shard], path, ": has ",
                 out.samples.size(), " samples, .nv-meta/.info.json says ", folder.counts[shard],
                 "\nhint: energon prepare counts them again");
  return out;
}

bool is_excluded(const EnergonFolder& folder, size_t shard, const std::string& key) {
  return !folder.excluded.empty() && folder.excluded.contains(cat(folder.shards[shard], "/", key));
}

}  // namespace megatron
