#include "megatron/datasets/multimodal/energon/energon_sample.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

using nlohmann::json;

std::string spelled(const std::vector<FieldPath>& paths) {
  std::string out;
  for (const FieldPath& path : paths) {
    out += cat(out.empty() ? "" : " or ", path[0]);
    for (size_t i = 1; i < path.size(); ++i) out += cat("[", path[i], "]");
  }
  return out;
}

std::string json_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool is_interleaved(const EnergonType& type) {
  return type.fields.contains("sequence") || type.fields.contains("images");
}

// -- fields

class FieldReader {
 public:
  FieldReader(const EnergonFolder& folder, size_t shard, const EnergonShard& content,
              const ShardSample& sample)
      : folder_(folder), shard_(folder.shards[shard]), content_(content), sample_(sample) {
    out_.name = cat(shard_, ": ", sample.key);
    out_.members = listed(sample.members, &ShardMember::extension);
  }

  EnergonSample read() {
    for (const auto& [field, paths] : folder_.fields) {
      if (field == "image")
        out_.image = image(paths);
      else
        out_.values[field] = value_of(field, paths);
    }
    if (is_interleaved(*folder_.type))
      for (const MemberKind kind : {MemberKind::kImage, MemberKind::kSound})
        for (const ShardMember* member : sample_.media(kind)) out_.media.push_back(medium(*member));
    return std::move(out_);
  }

 private:
  EnergonMedium medium(const ShardMember& member) const {
    const TarMember& place = member.place;
    MEGATRON_CHECK(place.size > 0, out_.name, ": byte ", place.offset, ": ", place.name,
                   " has 0 bytes");
    return {member.kind == MemberKind::kSound ? MediaKind::kSound : MediaKind::kImage,
            place.name,
            {shard_, place.offset, place.size}};
  }

  EnergonMedium image(const std::vector<FieldPath>& paths) const {
    for (const FieldPath& path : paths) {
      const ShardMember* member = sample_.find(path[0]);
      if (member == nullptr) continue;
      MEGATRON_CHECK(path.size() == 1 && member->kind == MemberKind::kImage, out_.name,
                     ": the image is ", member->place.name, ", no JPEG, PNG or WebP");
      return medium(*member);
    }
    throw_error(missing("image", paths));
  }

  std::string missing(const std::string& field, const std::vector<FieldPath>& paths) const {
    return cat(out_.name, ": has no ", field, ", which is ", spelled(paths), "; its members are ",
               out_.members);
  }

  // What stands at a place; a discarded value: nothing.
  json value_at(const FieldPath& path) const {
    const json none(json::value_t::discarded);
    const ShardMember* member = sample_.find(path[0]);
    if (member == nullptr) return none;
    const std::string text(
        reinterpret_cast<const char*>(content_.file.bytes().data()) + member->place.offset,
        member->place.size);
    if (member->kind != MemberKind::kJson) return path.size() == 1 ? json(text) : none;
    json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(!value.is_discarded(), out_.name, ": ", member->place.name, " is no JSON");
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

  json value_of(const std::string& field, const std::vector<FieldPath>& paths) const {
    for (const FieldPath& path : paths)
      if (json value = value_at(path); !value.is_discarded()) return value;
    throw_error(missing(field, paths));
  }

  const EnergonFolder& folder_;
  const std::string& shard_;
  const EnergonShard& content_;
  const ShardSample& sample_;
  EnergonSample out_;
};

// -- rows

std::string text_field(const EnergonSample& sample, const std::string& field) {
  const json& value = sample.values.at(field);
  MEGATRON_CHECK(value.is_string(), sample.name, ": ", field, " is ", value.type_name(),
                 ", no text");
  return value;
}

// That of most weight, the first of equals.
std::string answer_of(const EnergonSample& sample) {
  const json& all = sample.values.at("answers");
  if (all.is_string()) return all;
  MEGATRON_CHECK(all.is_array() && !all.empty(), sample.name,
                 ": answers are neither a text nor a list of texts");
  size_t best = 0;
  if (const auto given = sample.values.find("answer_weights"); given != sample.values.end()) {
    const json& weights = given->second;
    bool fits = weights.is_array() && weights.size() == all.size();
    for (const json& weight : weights) fits = fits && weight.is_number();
    MEGATRON_CHECK(fits, sample.name, ": answer_weights are not a number for each of ", all.size(),
                   " answers");
    for (size_t i = 1; i < weights.size(); ++i)
      if (weights[i].get<double>() > weights[best].get<double>()) best = i;
  }
  MEGATRON_CHECK(all[best].is_string(), sample.name, ": an answer is no text");
  return all[best];
}

std::string question_row(const EnergonSample& sample) {
  std::string question = text_field(sample, "context");
  constexpr const char* kImage = "<image>";
  if (question.find(kImage) == std::string::npos) question = cat(kImage, "\n", question);
  return json_text({{"conversations",
                     {{{"from", "human"}, {"value", question}},
                      {{"from", "gpt"}, {"value", answer_of(sample)}}}}});
}

// Texts and media in order, as the parts of a document.
class SequenceReader {
 public:
  SequenceReader(const EnergonSample& sample, SourceRow& row) : sample_(sample), row_(row) {}

  void read_sequence() {
    const json& sequence = sample_.values.at("sequence");
    if (sequence.is_array()) {
      for (const json& item : sequence) add_item(item);
    } else if (sequence.is_object() && sequence.contains("text_list")) {
      add_matched(list_of(sequence, "text_list"), list_of(sequence, "image_info"), nullptr);
    } else if (sequence.is_object() && sequence.contains("texts")) {
      add_parallel(list_of(sequence, "texts"), list_of(sequence, "images"));
    } else {
      fail("sequence is ", sequence.type_name(),
           ", expected a list of texts and media, texts with images, or text_list with "
           "image_info");
    }
    finish();
  }

  void read_matched() {
    const json fields(sample_.values);
    add_matched(list_of(fields, "texts"), list_of(fields, "images"),
                &fields["matched_text_indices"]);
    finish();
  }

 private:
  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw_error(cat(sample_.name, ": ", args...));
  }

  const json& list_of(const json& object, const char* name) const {
    if (!object.contains(name)) fail("the sequence has no ", name);
    if (!object[name].is_array()) fail(name, " is ", object[name].type_name(), ", no list");
    return object[name];
  }

  void add_text(const std::string& text) { parts_.push_back({{"type", "text"}, {"text", text}}); }

  void add_medium(const std::string& name, MediaKind kind) {
    for (const EnergonMedium& medium : sample_.media) {
      const std::string last = medium.name.substr(medium.name.rfind('/') + 1);
      if (name != medium.name && name != last && name != last.substr(last.find('.') + 1)) continue;
      if (medium.kind != kind)
        fail("the sequence names the ", name_of(kind), " ", name, ", which is none");
      parts_.push_back({{"type", kind == MediaKind::kImage ? "image" : "audio"}});
      row_.container.push_back({kind, medium.name, {}});
      row_.places.push_back(medium.place);
      return;
    }
    fail("the sequence names the ", name_of(kind), " ", name,
         ", which is not among the sample's members ", sample_.members);
  }

  void add_item(const json& item) {
    if (item.is_string()) return add_text(item);
    const auto named = [&](const char* key) {
      return item.is_object() && item.contains(key) && item[key].is_string();
    };
    if (named("image")) return add_medium(item["image"], MediaKind::kImage);
    if (named("audio")) return add_medium(item["audio"], MediaKind::kSound);
    if (named("text")) return add_text(item["text"]);
    fail("item ", parts_.size() + 1, " of the sequence is ", json_text(item).substr(0, 60),
         R"(, expected a text, {"text": ...}, {"image": MEMBER} or {"audio": MEMBER})");
  }

  // One of both is null at each place.
  void add_parallel(const json& texts, const json& images) {
    if (texts.size() != images.size())
      fail("the sequence has ", texts.size(), " texts for ", images.size(),
           " images, expected as many, one of both null at each place");
    for (size_t i = 0; i < texts.size(); ++i) {
      if (texts[i].is_string() && images[i].is_null())
        add_text(texts[i]);
      else if (images[i].is_string() && texts[i].is_null())
        add_medium(images[i], MediaKind::kImage);
      else
        fail("place ", i + 1, " of the sequence has the text ", json_text(texts[i]).substr(0, 60),
             " and the image ", json_text(images[i]).substr(0, 60), ", expected one of both");
    }
  }

  // Images before the texts that they match; a space between texts without one.
  void add_matched(const json& texts, const json& images, const json* indices) {
    if (indices != nullptr && (!indices->is_array() || indices->size() != images.size()))
      fail("matched_text_indices are not a number for each of ", images.size(), " images");
    std::vector<std::vector<std::string>> before(texts.size());
    for (size_t i = 0; i < images.size(); ++i) {
      const json& image = images[i];
      const bool object = image.is_object() && image.contains("image_name");
      const json& name = object ? image["image_name"] : image;
      json index;
      if (indices != nullptr)
        index = json((*indices)[i]);
      else if (object && image.contains("matched_text_index"))
        index = json(image["matched_text_index"]);
      if (!name.is_string()) fail("image ", i + 1, " of the sequence has no name of a member");
      if (!index.is_number_integer() || index < 0 || index >= texts.size())
        fail("the image ", name.get<std::string>(), " stands before text ", json_text(index),
             ", expected a number from 0 below ", texts.size());
      before[index.get<size_t>()].push_back(name);
    }
    for (size_t t = 0; t < texts.size(); ++t) {
      if (!texts[t].is_string()) fail("text ", t + 1, " of the sequence is ", texts[t].type_name());
      for (const std::string& name : before[t]) add_medium(name, MediaKind::kImage);
      const bool glued = t > 0 && before[t].empty();
      add_text((glued ? " " : "") + texts[t].get<std::string>());
    }
  }

  void finish() { row_.json = json_text({{"document", std::move(parts_)}}); }

  const EnergonSample& sample_;
  SourceRow& row_;
  json parts_ = json::array();
};

}  // namespace

void EnergonSample::join(EnergonSample other) {
  for (auto& [field, value] : other.values) values[field] = std::move(value);
  if (other.image) image = std::move(other.image);
  if (other.values.contains("sequence") || other.values.contains("images")) {
    media = std::move(other.media);
    members = std::move(other.members);
  }
}

EnergonSample read_energon_sample(const EnergonFolder& folder, size_t shard,
                                  const EnergonShard& content, const ShardSample& sample) {
  return FieldReader(folder, shard, content, sample).read();
}

SourceRow energon_row(const EnergonType& type, const EnergonSample& sample) {
  SourceRow row;
  row.name = sample.name;
  if (type.fields.contains("sequence")) {
    SequenceReader(sample, row).read_sequence();
    return row;
  }
  if (type.fields.contains("images")) {
    SequenceReader(sample, row).read_matched();
    return row;
  }
  row.container.push_back({MediaKind::kImage, sample.image->name, {}});
  row.places.push_back(sample.image->place);
  if (type.fields.contains("context"))
    row.json = question_row(sample);
  else
    row.caption = text_field(sample, type.fields.contains("caption") ? "caption" : "text");
  return row;
}

}  // namespace megatron
