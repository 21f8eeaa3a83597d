// preprocessor_config.json of transformers.
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/media/image_processor.h"

namespace megatron {
namespace {

using Kind = ImageProcessorConfig::Kind;
using Json = nlohmann::json;

constexpr PixelScaling kHalfScaling = {};

ImageProcessorConfig plain(const char* type, bool clip) {
  ImageProcessorConfig out{.type = type, .scaling = clip ? kClipScaling : kHalfScaling};
  if (clip) {
    out.shortest_edge = 224;
    out.crop = ImageSize{224, 224};
  } else {
    out.size = {224, 224};
  }
  return out;
}

// The classes that are built, with their defaults.
std::vector<ImageProcessorConfig> classes() {
  ImageProcessorConfig next = plain("LlavaNextImageProcessor", true);
  next.kind = Kind::kLlavaNext;
  next.pinpoints = {{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}};
  ImageProcessorConfig tiles{.kind = Kind::kInternVl,
                             .type = "GotOcr2ImageProcessor",
                             .scaling = kClipScaling,
                             .size = {384, 384}};
  ImageProcessorConfig gemma{.kind = Kind::kGemma3,
                             .type = "Gemma3ImageProcessor",
                             .filter = Resampling::kBilinear,
                             .size = {224, 224}};
  ImageProcessorConfig qwen{
      .kind = Kind::kQwen2Vl, .type = "Qwen2VLImageProcessor", .scaling = kClipScaling};
  qwen.min_pixels = 56 * 56;
  qwen.most_pixels = 28 * 28 * 1280;
  return {plain("CLIPImageProcessor", true),
          plain("LlavaImageProcessor", true),
          plain("SiglipImageProcessor", false),
          next,
          tiles,
          gemma,
          qwen};
}

// Keys that change no pixel.
const std::set<std::string> kWithoutEffect = {"image_processor_type", "feature_extractor_type",
                                              "processor_class",      "auto_map",
                                              "do_convert_rgb",       "default_to_square",
                                              "return_tensors",       "data_format",
                                              "input_data_format",    "device",
                                              "disable_grouping",     "_valid_processor_keys",
                                              "image_seq_length",     "image_seq_len",
                                              "model_input_names"};

// Reads members one by one; what nobody has asked for in the end is refused.
class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {}

  // The member, if it is there and not null.
  const Json* find(const char* key) {
    seen_.insert(key);
    const auto at = json_.find(key);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }
  void boolean(const char* key, bool& value) {
    if (const Json* json = find(key)) {
      if (!json->is_boolean()) fail(key, *json, "true or false");
      value = json->get<bool>();
    }
  }
  void number(const char* key, double& value) {
    if (const Json* json = find(key)) {
      if (!json->is_number()) fail(key, *json, "a number");
      value = json->get<double>();
    }
  }
  void count(const char* key, int64_t& value) {
    if (const Json* json = find(key)) value = count_of(key, *json);
  }
  int64_t count_of(const char* key, const Json& json) const {
    if (!json.is_number_integer() || json.get<int64_t>() < 1 || json.get<int64_t>() > 1 << 30)
      fail(key, json, "a number from 1 on");
    return json.get<int64_t>();
  }
  void channels(const char* key, std::array<double, 3>& values) {
    const Json* json = find(key);
    if (json == nullptr) return;
    if (json->is_number()) {
      values.fill(json->get<double>());
      return;
    }
    if (!json->is_array() || json->size() != 3) fail(key, *json, "three numbers");
    for (size_t c = 0; c < 3; ++c) {
      if (!(*json)[c].is_number()) fail(key, *json, "three numbers");
      values[c] = (*json)[c].get<double>();
    }
  }
  // A switch whose other value is not built.
  void expect(const char* key, bool wanted) {
    bool value = wanted;
    boolean(key, value);
    if (value != wanted) fail(key, Json(value), wanted ? "true" : "false");
  }
  void finish() const {
    for (const auto& [key, value] : json_.items())
      MEGATRON_CHECK(seen_.contains(key) || kWithoutEffect.contains(key) || value.is_null(), where_,
                     ": \"", key, "\" is not known; it may change pixels");
  }
  [[noreturn]] void fail(const char* key, const Json& json, const std::string& wanted) const {
    throw_error(cat(where_, ": \"", key, "\" is ", json.dump(), "; expected ", wanted));
  }

 private:
  const Json& json_;
  std::string where_;
  std::set<std::string> seen_;
};

ImageSize height_and_width(const Reader& reader, const char* key, const Json& json) {
  if (json.is_number()) return {reader.count_of(key, json), reader.count_of(key, json)};
  if (!json.is_object() || json.size() != 2 || !json.contains("height") || !json.contains("width"))
    reader.fail(key, json, "\"height\" and \"width\"");
  return {reader.count_of(key, json["height"]), reader.count_of(key, json["width"])};
}

// A number, {"shortest_edge"} or {"height", "width"}.
void read_plain_size(Reader& reader, ImageProcessorConfig& out) {
  const Json* json = reader.find("size");
  if (json == nullptr) return;
  const bool edge = json->is_object() && json->contains("shortest_edge");
  if ((json->is_number() && out.shortest_edge > 0) || (edge && json->size() == 1)) {
    out.shortest_edge = reader.count_of("size", edge ? (*json)["shortest_edge"] : *json);
  } else {
    out.size = height_and_width(reader, "size", *json);
    out.shortest_edge = 0;
  }
}

void read_crop(Reader& reader, ImageProcessorConfig& out) {
  bool crops = out.crop.has_value();
  reader.boolean("do_center_crop", crops);
  if (const Json* json = reader.find("crop_size"))
    out.crop = height_and_width(reader, "crop_size", *json);
  if (!crops) out.crop.reset();
  if (crops && !out.crop) reader.fail("crop_size", Json(), "the size of the crop");
}

// A tile's side: crop_size, which `size` has to equal.
void read_llava_next(Reader& reader, ImageProcessorConfig& out) {
  read_plain_size(reader, out);
  read_crop(reader, out);
  const int64_t edge = out.shortest_edge > 0 ? out.shortest_edge : out.size.height;
  if (out.shortest_edge > 0) out.size = {edge, edge};
  if (out.size.height != out.size.width || (out.crop && *out.crop != out.size))
    reader.fail("crop_size", Json(out.crop ? out.crop->height : 0), cat("size's, ", edge));
  out.shortest_edge = 0;
  out.crop.reset();
  reader.find("do_pad");  // pictures of a batch, to the same number
  const Json* const points = reader.find("image_grid_pinpoints");
  if (points == nullptr) return;
  out.pinpoints.clear();
  for (const Json& point : *points) {
    if (!point.is_array() || point.size() != 2)
      reader.fail("image_grid_pinpoints", *points, "pairs of height and width");
    out.pinpoints.push_back({reader.count_of("image_grid_pinpoints", point[0]),
                             reader.count_of("image_grid_pinpoints", point[1])});
    if (out.pinpoints.back().height % edge != 0 || out.pinpoints.back().width % edge != 0)
      reader.fail("image_grid_pinpoints", point, cat("multiples of the tile's side, ", edge));
  }
  if (out.pinpoints.empty())
    reader.fail("image_grid_pinpoints", *points, "pairs of height and width");
}

void read_intern_vl(Reader& reader, ImageProcessorConfig& out, bool of_processor) {
  read_plain_size(reader, out);
  if (out.shortest_edge > 0) reader.fail("size", Json(), "\"height\" and \"width\"");
  out.use_tiles = of_processor;
  reader.boolean("crop_to_patches", out.use_tiles);
  reader.count("min_patches", out.min_tiles);
  reader.count("max_patches", out.most_tiles);
}

void read_gemma3(Reader& reader, ImageProcessorConfig& out) {
  read_plain_size(reader, out);
  if (out.shortest_edge > 0) reader.fail("size", Json(), "\"height\" and \"width\"");
  bool scans = false;
  PanAndScan options;
  reader.boolean("do_pan_and_scan", scans);
  reader.count("pan_and_scan_min_crop_size", options.min_crop);
  reader.count("pan_and_scan_max_num_crops", options.most_crops);
  reader.number("pan_and_scan_min_ratio_to_activate", options.from_ratio);
  if (scans) out.pan_and_scan = options;
}

void read_qwen2_vl(Reader& reader, ImageProcessorConfig& out) {
  if (const Json* json = reader.find("size")) {
    if (!json->is_object()) reader.fail("size", *json, "\"shortest_edge\" and \"longest_edge\"");
    for (const auto& [key, value] : json->items()) {
      if (key == "shortest_edge" || key == "min_pixels") {
        out.min_pixels = reader.count_of("size", value);
      } else if (key == "longest_edge" || key == "max_pixels") {
        out.most_pixels = reader.count_of("size", value);
      } else {
        reader.fail("size", *json, "\"shortest_edge\" and \"longest_edge\"");
      }
    }
  }
  reader.count("min_pixels", out.min_pixels);
  reader.count("max_pixels", out.most_pixels);
  reader.count("patch_size", out.patch);
  reader.count("merge_size", out.merge);
  reader.count("temporal_patch_size", out.frames);
}

// "CLIPImageProcessor" of "CLIPImageProcessorFast" and "CLIPFeatureExtractor".
std::string base_name(std::string type) {
  for (const char* suffix : {"Fast", "Pil"})
    if (type.ends_with(suffix)) type.resize(type.size() - std::string_view(suffix).size());
  constexpr std::string_view kOld = "FeatureExtractor";
  if (type.ends_with(kOld)) type.replace(type.size() - kOld.size(), kOld.size(), "ImageProcessor");
  return type;
}

ImageProcessorConfig class_of(Reader& reader, const std::string& where) {
  const Json* type = reader.find("image_processor_type");
  if (type == nullptr) type = reader.find("feature_extractor_type");
  MEGATRON_CHECK(type != nullptr && type->is_string(), where,
                 ": no \"image_processor_type\"; expected the name of its class");
  const std::string name = base_name(type->get<std::string>());
  const auto known = classes();
  for (const ImageProcessorConfig& config : known)
    if (config.type == name) return config;
  throw_error(cat(where, ": the image processor ", name, " is not built; expected one of ",
                  listed(known, &ImageProcessorConfig::type)));
}

}  // namespace

ImageProcessorConfig read_image_processor(std::string_view text, const std::string& where) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object(), where, ": not a JSON object");
  const std::string processor =
      json.contains("processor_class") && json["processor_class"].is_string()
          ? json["processor_class"].get<std::string>()
          : "";
  if (json.contains("image_processor") && json["image_processor"].is_object())
    json = Json(json["image_processor"]);
  Reader reader(json, where);
  ImageProcessorConfig out = class_of(reader, where);
  reader.expect("do_resize", true);
  reader.expect("do_rescale", true);
  reader.expect("do_normalize", true);
  reader.number("rescale_factor", out.scaling.scale);
  reader.channels("image_mean", out.scaling.mean);
  reader.channels("image_std", out.scaling.deviation);
  if (const Json* filter = reader.find("resample")) {
    if (!filter->is_number_integer() || filter->get<int64_t>() < 1 || filter->get<int64_t>() > 5)
      reader.fail("resample", *filter, "1 to 5 (Pillow's filters; 0, the nearest, is not built)");
    out.filter = static_cast<Resampling>(filter->get<int>());
  }
  switch (out.kind) {
    case Kind::kPlain:
      read_plain_size(reader, out);
      read_crop(reader, out);
      if (out.type == "LlavaImageProcessor") {
        reader.boolean("do_pad", out.pad_to_square);
      } else {
        reader.expect("do_pad", false);
      }
      break;
    case Kind::kLlavaNext:
      read_llava_next(reader, out);
      break;
    case Kind::kInternVl:
      read_intern_vl(reader, out, processor == "InternVLProcessor");
      break;
    case Kind::kGemma3:
      read_gemma3(reader, out);
      break;
    case Kind::kQwen2Vl:
      read_qwen2_vl(reader, out);
      break;
  }
  reader.finish();
  for (const double deviation : out.scaling.deviation)
    MEGATRON_CHECK(deviation != 0, where, ": \"image_std\" is 0; expected another number");
  return out;
}

}  // namespace megatron
