#include "megatron/datasets/multimodal/energon.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/datasets/multimodal/webdataset.h"
#include "megatron/datasets/multimodal/yaml_json.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMostExpanded = 100'000, kMostPattern = 4096;
constexpr uint64_t kMostMetaBytes = uint64_t{64} << 20;
constexpr int kMostBlends = 32;  // within one another
constexpr const char* kCaptioning = "CaptioningSample";
constexpr const char* kAnswering = "VQASample";

fs::path meta_of(const fs::path& folder) { return folder / ".nv-meta"; }

// A file of YAML, or of JSON, which is YAML.
json read_meta(const fs::path& path) {
  return json::parse(yaml_to_json(read_file(path, kMostMetaBytes), path.string()));
}

// The first of the files that there is.
fs::path first_of(const fs::path& folder, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (fs::exists(folder / name)) return folder / name;
  throw_error(
      cat(folder.string(), ": has no ", *names.begin(), "\nhint: energon prepare writes it"));
}

// -- braces

// Numbers or letters FIRST..LAST[..STEP] of what stands between braces; empty: it is no range.
std::vector<std::string> expanded_range(const std::string& text) {
  std::vector<std::string> ends;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find("..", begin), text.size());
    ends.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  if (ends.size() != 2 && ends.size() != 3) return {};
  const auto is_number = [](const std::string& s) {
    const size_t sign = s.starts_with('-') ? 1 : 0;
    return s.size() > sign && s.size() < sign + 10 &&
           s.find_first_not_of("0123456789", sign) == std::string::npos;
  };
  const bool numbers = is_number(ends[0]) && is_number(ends[1]);
  const bool letters = ends[0].size() == 1 && ends[1].size() == 1 && !numbers;
  if ((!numbers && !letters) || (ends.size() == 3 && !is_number(ends[2]))) return {};
  const int64_t first = numbers ? std::stoll(ends[0]) : ends[0][0],
                last = numbers ? std::stoll(ends[1]) : ends[1][0],
                step = std::max<int64_t>(1, ends.size() == 3 ? std::abs(std::stoll(ends[2])) : 1);
  const auto padded = [&](const std::string& s) {
    return s.size() > 1 && (s[0] == '0' || s.starts_with("-0"));
  };
  const size_t width = numbers && (padded(ends[0]) || padded(ends[1]))
                           ? std::max(ends[0].size(), ends[1].size())
                           : 0;
  std::vector<std::string> out;
  for (int64_t i = 0; i <= std::abs(last - first) / step; ++i) {
    MEGATRON_CHECK(out.size() < kMostExpanded, "{", text, "}: stands for more than ", kMostExpanded,
                   " names");
    const int64_t value = first < last ? first + i * step : first - i * step;
    if (letters) {
      out.emplace_back(1, static_cast<char>(value));
      continue;
    }
    std::string digits = std::to_string(std::abs(value));
    const std::string sign = value < 0 ? "-" : "";
    if (digits.size() + sign.size() < width)
      digits.insert(0, width - sign.size() - digits.size(), '0');
    out.push_back(sign + digits);
  }
  return out;
}

struct Braces {
  size_t open = 0, close = 0;
  std::vector<std::string> items;  // between commas of this depth
};

// The first pair that stands for something; none: false.
bool find_braces(const std::string& text, Braces& out) {
  for (size_t open = text.find('{'); open != std::string::npos; open = text.find('{', open + 1)) {
    int depth = 0;
    std::vector<std::string> items(1);
    for (size_t i = open; i < text.size(); ++i) {
      if (text[i] == '{' && ++depth == 1) continue;
      if (text[i] == '}' && --depth == 0) {
        if (items.size() == 1) items = expanded_range(items[0]);
        if (items.empty()) break;
        out = {open, i, std::move(items)};
        return true;
      }
      if (text[i] == ',' && depth == 1)
        items.emplace_back();
      else
        items.back() += text[i];
    }
  }
  return false;
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

std::string spelled(const std::vector<FieldPath>& paths) {
  std::string out;
  for (const FieldPath& path : paths) {
    out += cat(out.empty() ? "" : " or ", path[0]);
    for (size_t i = 1; i < path.size(); ++i) out += cat("[", path[i], "]");
  }
  return out;
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
  MEGATRON_CHECK(name == kCaptioning || name == kAnswering, where, ": samples of type ", name,
                 " are not built\nhint: CaptioningSample and VQASample are");
  return name;
}

void read_fields(const json& meta, const std::string& where, EnergonFolder& out) {
  const std::set<std::string> known =
      out.sample_type == kCaptioning
          ? std::set<std::string>{"image", "caption"}
          : std::set<std::string>{"image", "context", "answers", "answer_weights"};
  MEGATRON_CHECK(meta.contains("field_map") && meta["field_map"].is_object(), where,
                 ": has no field_map");
  for (const auto& [name, place] : meta["field_map"].items()) {
    MEGATRON_CHECK(known.contains(name), where, ": ", out.sample_type, " has no field ", name,
                   "\nhint: its fields are ", listed(known));
    MEGATRON_CHECK(place.is_string(), where, ": field_map of ", name, " is no text");
    out.fields[name] = field_paths(place, where);
  }
  for (const std::string& name : known)
    MEGATRON_CHECK(name == "answer_weights" || out.fields.contains(name), where,
                   ": field_map has no ", name);
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

void read_parts(const fs::path& meta, const std::string& part, EnergonFolder& out) {
  const fs::path split_file = first_of(meta, {"split.yaml", "split.json"});
  const json split = read_meta(split_file);
  const std::string where = split_file.string();
  MEGATRON_CHECK(
      split.is_object() && split.contains("split_parts") && split["split_parts"].is_object(), where,
      ": has no split_parts");
  const std::vector<std::string> excluded =
      split.contains("exclude") && !split["exclude"].is_null()
          ? names_of(split["exclude"], cat(where, ": exclude"))
          : std::vector<std::string>();
  MEGATRON_CHECK(split["split_parts"].contains(part), where, ": split_parts has no ", part);
  const fs::path info_file = first_of(meta, {".info.json", ".info.yaml"});
  const json info = read_meta(info_file);
  MEGATRON_CHECK(
      info.is_object() && info.contains("shard_counts") && info["shard_counts"].is_object(),
      info_file.string(), ": has no shard_counts");
  for (const std::string& name :
       names_of(split["split_parts"][part], cat(where, ": split_parts of ", part))) {
    if (std::ranges::find(excluded, name) != excluded.end()) continue;
    const fs::path shard = fs::path(out.path) / name;
    MEGATRON_CHECK(!fs::path(name).is_absolute() && name.find("..") == std::string::npos, where,
                   ": the shard ", name, " leaves the folder");
    MEGATRON_CHECK(fs::exists(shard), where, ": there is no shard ", shard.string());
    const json& counts = info["shard_counts"];
    MEGATRON_CHECK(counts.contains(name) && counts[name].is_number_integer(), info_file.string(),
                   ": shard_counts has no number of ", name);
    out.shards.push_back(shard.string());
    out.counts[shard.string()] = counts[name].get<int64_t>();
  }
  MEGATRON_CHECK(!out.shards.empty(), where, ": split_parts of ", part, " has no shards",
                 part == "train" ? "" : "\nhint: without validation and test, --eval-iters 0");
  for (const std::string& name : excluded)
    if (const size_t slash = name.find(".tar/"); slash != std::string::npos)
      out.excluded.insert((fs::path(out.path) / name).string());
}

// -- samples

class SampleReader {
 public:
  SampleReader(const EnergonFolder& folder, const MappedFile& file, const std::string& shard,
               const ShardSample& sample)
      : folder_(folder), file_(file), shard_(shard), sample_(sample) {
    row_.name = cat(shard, ": ", sample.key);
  }

  SourceRow read() {
    add_image();
    if (folder_.sample_type == kCaptioning) {
      row_.caption = text_of("caption");
      return std::move(row_);
    }
    std::string question = text_of("context");
    constexpr const char* kImage = "<image>";
    if (question.find(kImage) == std::string::npos) question = cat(kImage, "\n", question);
    row_.json =
        json{{"conversations",
              {{{"from", "human"}, {"value", question}}, {{"from", "gpt"}, {"value", answer()}}}}}
            .dump(-1, ' ', false, json::error_handler_t::replace);
    return std::move(row_);
  }

 private:
  const std::vector<FieldPath>& paths_of(const std::string& field) const {
    return folder_.fields.at(field);
  }

  void add_image() {
    for (const FieldPath& path : paths_of("image")) {
      const ShardMember* member = sample_.find(path[0]);
      if (member == nullptr) continue;
      const TarMember& place = member->place;
      MEGATRON_CHECK(path.size() == 1 && member->kind == MemberKind::kImage, row_.name,
                     ": the image is ", place.name, ", no JPEG, PNG or WebP");
      MEGATRON_CHECK(place.size > 0, row_.name, ": byte ", place.offset, ": ", place.name,
                     " has 0 bytes");
      row_.container.push_back({MediaKind::kImage, place.name, {}});
      row_.places.push_back({shard_, place.offset, place.size});
      return;
    }
    throw_error(missing("image"));
  }

  std::string missing(const std::string& field) const {
    return cat(row_.name, ": has no ", field, ", which is ", spelled(paths_of(field)),
               "; its members are ", listed(sample_.members, &ShardMember::extension));
  }

  // What stands at a place; a discarded value: nothing.
  json value_at(const FieldPath& path) const {
    const json none(json::value_t::discarded);
    const ShardMember* member = sample_.find(path[0]);
    if (member == nullptr) return none;
    const std::string text(
        reinterpret_cast<const char*>(file_.bytes().data()) + member->place.offset,
        member->place.size);
    if (member->kind != MemberKind::kJson) return path.size() == 1 ? json(text) : none;
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(!value.is_discarded(), row_.name, ": ", member->place.name, " is no JSON");
    for (size_t i = 1; i < path.size(); ++i) {
      const std::string& key = path[i];
      const bool number =
          key.size() < 10 && key.find_first_not_of("0123456789") == std::string::npos;
      if (value.is_object() && value.contains(key))
        value = json(value[key]);
      else if (value.is_array() && number && std::stoull(key) < value.size())
        value = json(value[std::stoull(key)]);
      else
        return none;
    }
    return value;
  }

  json value_of(const std::string& field) const {
    for (const FieldPath& path : paths_of(field))
      if (json value = value_at(path); !value.is_discarded()) return value;
    throw_error(missing(field));
  }

  std::string text_of(const std::string& field) const {
    const json value = value_of(field);
    MEGATRON_CHECK(value.is_string(), row_.name, ": ", field, " is ", value.type_name(),
                   ", no text");
    return value;
  }

  // That of most weight, the first of equals.
  std::string answer() const {
    const json all = value_of("answers");
    if (all.is_string()) return all;
    MEGATRON_CHECK(all.is_array() && !all.empty(), row_.name,
                   ": answers are neither a text nor a list of texts");
    size_t best = 0;
    if (folder_.fields.contains("answer_weights")) {
      const json weights = value_of("answer_weights");
      bool fits = weights.is_array() && weights.size() == all.size();
      for (const json& weight : weights) fits = fits && weight.is_number();
      MEGATRON_CHECK(fits, row_.name, ": answer_weights are not a number for each of ", all.size(),
                     " answers");
      for (size_t i = 1; i < weights.size(); ++i)
        if (weights[i].get<double>() > weights[best].get<double>()) best = i;
    }
    MEGATRON_CHECK(all[best].is_string(), row_.name, ": an answer is no text");
    return all[best];
  }

  const EnergonFolder& folder_;
  const MappedFile& file_;
  const std::string& shard_;
  const ShardSample& sample_;
  SourceRow row_;
};

// -- blends

struct EnergonBlend {
  std::vector<std::pair<double, std::string>> members;

  void add(const fs::path& file, const json& entry, const std::string& part, double weight,
           int depth);
};

void add_path(const fs::path& path, const std::string& part, double weight, int depth,
              EnergonBlend& blend);

void EnergonBlend::add(const fs::path& file, const json& entry, const std::string& part,
                       double weight, int depth) {
  const std::string where = file.string();
  MEGATRON_CHECK(depth < kMostBlends, where, ": blends lie more than ", kMostBlends,
                 " deep within one another");
  MEGATRON_CHECK(entry.is_object(), where, ": an entry of ", part, " is no object");
  for (const char* key : {"join", "concat", "blend_epochized", "blend_joint"})
    MEGATRON_CHECK(!entry.contains(key), where, ": ", key, " is not built\nhint: blend is");
  for (const char* key : {"subset", "split_config", "aux", "shuffle_over_epochs_multiplier"})
    MEGATRON_CHECK(!entry.contains(key), where, ": ", key, " of a data set is not built");
  if (entry.contains("split_part"))
    MEGATRON_CHECK(entry["split_part"] == part, where, ": split_part ", entry["split_part"].dump(),
                   " within ", part, " is not built");
  if (entry.contains("blend")) {
    MEGATRON_CHECK(entry["blend"].is_array() && !entry["blend"].empty(), where,
                   ": a blend is no list");
    double sum = 0;
    std::vector<double> weights;
    for (const json& one : entry["blend"]) {
      MEGATRON_CHECK(one.is_object(), where, ": a member of a blend is no object");
      const json own = one.contains("weight") ? one["weight"] : json(1.0);
      MEGATRON_CHECK(own.is_number() && own > 0, where, ": a weight of a blend is ", own.dump());
      weights.push_back(own.get<double>());
      sum += weights.back();
    }
    for (size_t i = 0; i < weights.size(); ++i)
      add(file, entry["blend"][i], part, weight * weights[i] / sum, depth + 1);
    return;
  }
  MEGATRON_CHECK(entry.contains("path") && entry["path"].is_string(), where, ": an entry of ", part,
                 " has neither path nor blend");
  const std::string path = entry["path"];
  MEGATRON_CHECK(path.find("://") == std::string::npos, where, ": ", path,
                 " is no local path: nothing is fetched");
  add_path(file.parent_path() / path, part, weight, depth, *this);
}

void add_path(const fs::path& path, const std::string& part, double weight, int depth,
              EnergonBlend& blend) {
  if (!is_energon_blend(path.string())) {
    MEGATRON_CHECK(is_energon_folder(path.string()), path.string(),
                   ": is neither a blend nor a folder with .nv-meta/dataset.yaml");
    blend.members.emplace_back(weight, path.lexically_normal().string());
    return;
  }
  const json meta = read_meta(path);
  const std::string where = path.string();
  const bool typed =
      meta.is_object() && meta.contains("__class__") && meta["__class__"].is_string();
  const std::string type = typed ? meta["__class__"] : json("");
  MEGATRON_CHECK(type == "MetadatasetV2", where, ": a blend of type ", type,
                 " is not built\nhint: MetadatasetV2 is");
  MEGATRON_CHECK(meta.contains("splits") && meta["splits"].is_object(), where, ": has no splits");
  if (meta["splits"].contains(part)) blend.add(path, meta["splits"][part], part, weight, depth + 1);
}

}  // namespace

std::vector<std::string> expanded_braces(const std::string& text) {
  MEGATRON_CHECK(text.size() <= kMostPattern, text.substr(0, 40), "...: a name of ", text.size(),
                 " bytes");
  Braces braces;
  if (!find_braces(text, braces)) return {text};
  std::vector<std::string> out;
  for (const std::string& item : braces.items)
    for (std::string& one :
         expanded_braces(cat(text.substr(0, braces.open), item, text.substr(braces.close + 1)))) {
      MEGATRON_CHECK(out.size() < kMostExpanded, text, ": stands for more than ", kMostExpanded,
                     " names");
      out.push_back(std::move(one));
    }
  return out;
}

bool is_energon_folder(const std::string& path) {
  std::error_code error;
  return fs::exists(meta_of(path) / "dataset.yaml", error) ||
         fs::exists(meta_of(path) / ".info.json", error);
}

std::shared_ptr<const EnergonFolder> read_energon_folder(const std::string& path,
                                                         const std::string& part) {
  auto out = std::make_shared<EnergonFolder>();
  out->path = path;
  const fs::path file = first_of(meta_of(path), {"dataset.yaml", "dataset.yml"});
  const json meta = read_meta(file);
  MEGATRON_CHECK(meta.is_object(), file.string(), ": is no list of names and values");
  out->sample_type = sample_type_of(meta, file.string());
  read_fields(meta, file.string(), *out);
  read_parts(meta_of(path), part, *out);
  json excluded = json::array();
  for (const std::string& name : out->excluded) excluded.push_back(name.substr(path.size()));
  out->description = json{
      {"type", out->sample_type},
      {"fields", meta["field_map"]},
      {"part", part},
      {"excluded",
       excluded}}.dump();
  return out;
}

void read_energon_shard(const EnergonFolder& folder, const std::string& shard,
                        const std::function<void(SourceRow)>& emit) {
  const MappedFile file(shard);
  const std::vector<ShardSample> samples = group_members(read_tar(file.bytes(), shard), shard);
  const int64_t told = folder.counts.at(shard);
  MEGATRON_CHECK(std::ssize(samples) == told, shard, ": has ", samples.size(),
                 " samples, .nv-meta/.info.json says ", told,
                 "\nhint: energon prepare counts them again");
  for (const ShardSample& sample : samples)
    if (!folder.excluded.contains(cat(shard, "/", sample.key)))
      emit(SampleReader(folder, file, shard, sample).read());
}

bool is_energon_blend(const std::string& path) {
  return (path.ends_with(".yaml") || path.ends_with(".yml")) && fs::is_regular_file(path);
}

std::vector<std::string> read_energon_blend(const std::string& path, const std::string& part) {
  EnergonBlend blend;
  add_path(path, part, 1, 0, blend);
  if (blend.members.size() == 1) return {blend.members[0].second};
  std::vector<std::string> out;
  for (const auto& [weight, folder] : blend.members) {
    out.push_back(json(weight).dump());
    out.push_back(folder);
  }
  return out;
}

}  // namespace megatron
