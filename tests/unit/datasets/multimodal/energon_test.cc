// Folders of Megatron-Energon: the samples that it reads in them itself
// (tests/golden/multimodal/make_energon.py), and what is wrong in them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "megatron/media/image_header.h"
#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;
using testing::ElementsAre;

std::vector<SourceSample> samples_of(const std::string& path, const std::string& part = "train") {
  std::vector<SourceSample> out;
  const SourceFiles files = list_source_files(path, part);
  for (size_t file = 0; file < files.paths.size(); ++file)
    read_source_file(files, file,
                     [&](const SourceRow& row) { out.push_back(read_sample(row, "")); });
  return out;
}

ImageSize size_of(const SourceSample& sample) {
  const std::string bytes = read_range(sample.places.at(0), sample.name);
  return read_image_header(
             {{reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, sample.name})
      .size();
}

TEST(Energon, ReadsWhatEnergonReads) {
  const auto golden = nlohmann::json::parse(read_file(kGoldens + "energon.json"));
  size_t count = 0;
  for (const auto& [name, rows] : golden.items()) {
    const size_t slash = name.find('/');
    const std::vector<SourceSample> own =
        samples_of(kGoldens + "energon/" + name.substr(0, slash), name.substr(slash + 1));
    ASSERT_EQ(own.size(), rows.size()) << name;
    for (size_t i = 0; i < own.size(); ++i, ++count) {
      const auto& row = rows[i];
      EXPECT_TRUE(own[i].name.ends_with(": " + row["key"].get<std::string>())) << own[i].name;
      EXPECT_EQ(size_of(own[i]).height, row["image"][0]);
      EXPECT_EQ(size_of(own[i]).width, row["image"][1]);
      MultimodalRow shown = own[i].row;
      shown.media.at(0).path = "i";
      if (row.contains("caption")) {
        EXPECT_EQ(text_of(shown), "[image:i] " + row["caption"].get<std::string>());
        continue;
      }
      std::string question = row["context"];
      question = question.substr(question.starts_with("<image>\n") ? 8 : 0);
      EXPECT_EQ(text_of(shown), cat("user [image:i]\n", question, " | assistant ",
                                    row["answers"].get<std::string>()));
    }
  }
  EXPECT_EQ(count, 8U);
}

TEST(Energon, ExpandsBracesAsPythonsBraceexpand) {
  EXPECT_THAT(expanded_braces("a_{00..02}.tar"), ElementsAre("a_00.tar", "a_01.tar", "a_02.tar"));
  EXPECT_THAT(expanded_braces("{a,b}{1..2}"), ElementsAre("a1", "a2", "b1", "b2"));
  EXPECT_THAT(expanded_braces("{a}"), ElementsAre("{a}"));
  EXPECT_THAT(expanded_braces("x{,y}"), ElementsAre("x", "xy"));
  EXPECT_THAT(expanded_braces("{1..10..3}"), ElementsAre("1", "4", "7", "10"));
  EXPECT_THAT(expanded_braces("{03..1}"), ElementsAre("03", "02", "01"));
  EXPECT_THAT(expanded_braces("{a..c}"), ElementsAre("a", "b", "c"));
  EXPECT_THAT(expanded_braces("{a,{b,c}d}"), ElementsAre("a", "bd", "cd"));
  EXPECT_THAT(expanded_braces("{-01..1}"), ElementsAre("-01", "000", "001"));
  EXPECT_EQ(error_of([] { expanded_braces("{0..99999999}"); }),
            "{0..99999999}: stands for more than 100000 names");
}

// A folder of one shard that can be damaged in one place.
class EnergonFolders : public testing::Test {
 protected:
  std::string write(const std::string& dataset, const std::string& split, const std::string& info,
                    const std::vector<std::pair<std::string, std::string>>& members) const {
    folder_.write(".nv-meta/dataset.yaml", dataset);
    folder_.write(".nv-meta/split.yaml", split);
    folder_.write(".nv-meta/.info.json", info);
    folder_.write("a.tar", tar_of(members));
    return folder_.path();
  }
  std::string type(const std::string& name, const std::string& fields) const {
    return cat("sample_type: {__module__: megatron.energon, __class__: ", name, "}\nfield_map: {",
               fields, "}\n");
  }
  std::string error(const std::string& dataset, const std::string& split = "",
                    const std::string& info = "",
                    const std::vector<std::pair<std::string, std::string>>& members = {
                        {"1.png", "P"}, {"1.txt", "t"}}) const {
    const std::string path =
        write(dataset, split.empty() ? kSplit : split, info.empty() ? kInfo : info, members);
    const std::string message = error_of([&] { samples_of(path); });
    return message.starts_with(path) ? message.substr(path.size() + 1) : message;
  }

  const std::string kSplit = "split_parts: {train: [a.tar]}\n",
                    kInfo = R"({"shard_counts": {"a.tar": 1}})",
                    kCaptions = type("CaptioningSample", "image: png, caption: txt");
  Folder folder_;
};

TEST_F(EnergonFolders, TakesTheAnswerOfMostWeight) {
  const std::string facts = R"({"q": "What?", "a": ["x", "y", "z"], "w": [0.5, 2, 2]})";
  write(type("VQASample",
             "image: png, context: 'json[q]', answers: 'json[a]', answer_weights: 'json[w]'"),
        kSplit, kInfo, {{"1.png", "P"}, {"1.json", facts}});
  EXPECT_TRUE(text_of(samples_of(folder_.path()).at(0).row).ends_with("What? | assistant y"));
  write(type("VQASample", "image: png, context: 'json[q]', answers: 'json[a]'"), kSplit, kInfo,
        {{"1.png", "P"}, {"1.json", facts}});
  EXPECT_TRUE(text_of(samples_of(folder_.path()).at(0).row).ends_with("What? | assistant x"));
}

TEST_F(EnergonFolders, NamesWhatIsWrong) {
  EXPECT_EQ(error("[1, 2]"), ".nv-meta/dataset.yaml: is no list of names and values");
  EXPECT_THAT(error("a: [1"), testing::StartsWith(".nv-meta/dataset.yaml:1: no YAML: "));
  EXPECT_EQ(error("field_map: {}"), ".nv-meta/dataset.yaml: says no sample_type.__class__");
  EXPECT_EQ(error(type("CrudeWebdataset", "")),
            ".nv-meta/dataset.yaml: samples of type CrudeSample are not built\nhint: "
            "CaptioningSample, VQASample, OCRSample, InterleavedSample, "
            "SimilarityInterleavedSample, ImageSample, TextSample are");
  EXPECT_EQ(error("__class__: VQAWebdataset\nsample_loader: x.py:f\n"),
            ".nv-meta/dataset.yaml: has a sample_loader, a program that makes samples, which is "
            "not run\nhint: a field_map says where the fields lie");
  EXPECT_EQ(error(type("CaptioningSample", "image: png")),
            ".nv-meta/dataset.yaml: field_map has no caption");
  EXPECT_EQ(error(type("CaptioningSample", "picture: png")),
            ".nv-meta/dataset.yaml: the field picture of CaptioningSample is not read\nhint: the "
            "fields that are read are caption, image");
  EXPECT_EQ(error(type("CaptioningSample", "image: png, caption: 'json[a'")),
            ".nv-meta/dataset.yaml: the place json[a of a field is none\nhint: EXTENSION, or "
            "json[KEY][NUMBER]");
  EXPECT_EQ(error(kCaptions, "exclude: []"), ".nv-meta/split.yaml: has no split_parts");
  EXPECT_EQ(error(kCaptions, "split_parts: {val: [a.tar]}"),
            ".nv-meta/split.yaml: split_parts has no train");
  EXPECT_EQ(error(kCaptions, "split_parts: {train: []}"),
            ".nv-meta/split.yaml: split_parts of train has no shards");
  EXPECT_EQ(error(kCaptions, "split_parts: {train: [../a.tar]}"),
            ".nv-meta/split.yaml: the shard ../a.tar leaves the folder");
  EXPECT_THAT(error(kCaptions, "split_parts: {train: [b.tar]}"),
              testing::StartsWith(".nv-meta/split.yaml: there is no shard "));
  EXPECT_EQ(error(kCaptions, "", R"({"shard_counts": {}})"),
            ".nv-meta/.info.json: shard_counts has no number of a.tar");
  EXPECT_EQ(error(kCaptions, "", R"({"shard_counts": {"a.tar": 2}})"),
            "a.tar: has 1 samples, .nv-meta/.info.json says 2\nhint: energon prepare counts them "
            "again");
  EXPECT_EQ(error(type("CaptioningSample", "image: 'jpg,webp', caption: txt")),
            "a.tar: 1: has no image, which is jpg or webp; its members are png, txt");
  EXPECT_EQ(error(type("CaptioningSample", "image: txt, caption: txt")),
            "a.tar: 1: the image is 1.txt, no JPEG, PNG or WebP");
  EXPECT_EQ(error(type("CaptioningSample", "image: png, caption: 'json[a][0]'"), "", "",
                  {{"1.png", "P"}, {"1.json", R"({"a": []})"}}),
            "a.tar: 1: has no caption, which is json[a][0]; its members are png, json");
  EXPECT_EQ(error(type("CaptioningSample", "image: png, caption: 'json[a]'"), "", "",
                  {{"1.png", "P"}, {"1.json", R"({"a": [1]})"}}),
            "a.tar: 1: caption is array, no text");
}

// Texts and media in order: lists of them, as in OBELICS, as in MMC4, and by fields.
TEST_F(EnergonFolders, InterleavedSamples) {
  const auto shown = [&](const std::string& json, const std::string& dataset = "") {
    write(dataset.empty() ? type("InterleavedSample", "sequence: json") : dataset, kSplit, kInfo,
          {{"d/1.a.png", "A"}, {"d/1.b.jpg", "B"}, {"d/1.wav", "W"}, {"d/1.json", json}});
    return text_of(samples_of(folder_.path()).at(0).row);
  };
  const std::string places = "[image:d/1.a.png]two [image:d/1.b.jpg]";
  EXPECT_EQ(shown(R"(["one ", {"image": "a.png"}, {"text": "two "}, {"image": "d/1.b.jpg"}])"),
            "one " + places);
  EXPECT_EQ(shown(R"([{"type": "audio", "audio": "1.wav"}, "x", {"image": "a.png"}])"),
            "[sound:d/1.wav]x[image:d/1.a.png]");
  EXPECT_EQ(shown(R"(["a", {"image": "a.png"}, {"image": "a.png"}])"),
            "a[image:d/1.a.png][image:d/1.a.png]");
  EXPECT_EQ(shown(R"({"texts": ["one ", null, "two ", null], "images": [null, "a.png", null,
                      "b.jpg"]})"),
            "one " + places);
  const std::string texts = R"("text_list": ["one.", "two.", "three."])";
  EXPECT_EQ(shown(cat("{", texts, R"(, "image_info": [
                {"image_name": "b.jpg", "matched_text_index": 2},
                {"image_name": "a.png", "matched_text_index": 0}]})")),
            "[image:d/1.a.png]one. two.[image:d/1.b.jpg]three.");
  const std::string matched =
      type("SimilarityInterleavedSample",
           "texts: 'json[t]', images: 'json[i]', matched_text_indices: 'json[m]'");
  EXPECT_EQ(shown(R"({"t": ["x", "y"], "i": ["a.png", "b.jpg"], "m": [1, 1]})", matched),
            "x[image:d/1.a.png][image:d/1.b.jpg]y");
  EXPECT_EQ(shown(R"(["only words"])"), "only words");
}

TEST_F(EnergonFolders, InterleavedSamplesThatAreWrong) {
  const auto wrong = [&](const std::string& json, const std::string& dataset = "") {
    const std::string message =
        error(dataset.empty() ? type("InterleavedSample", "sequence: json") : dataset, "", "",
              {{"1.a.png", "A"}, {"1.wav", "W"}, {"1.json", json}});
    EXPECT_TRUE(message.starts_with("a.tar: 1: ")) << message;
    return message.substr(std::min<size_t>(10, message.size()));
  };
  EXPECT_EQ(wrong(R"([{"image": "b.png"}])"),
            "the sequence names the image b.png, which is not among the sample's members a.png, "
            "wav, json");
  EXPECT_EQ(wrong(R"([{"image": "1.wav"}])"), "the sequence names the image 1.wav, which is none");
  EXPECT_EQ(wrong(R"(["x", null])"),
            "item 2 of the sequence is null, expected a text, {\"text\": ...}, {\"image\": MEMBER} "
            "or {\"audio\": MEMBER}");
  EXPECT_EQ(wrong(R"("x")"),
            "sequence is string, expected a list of texts and media, texts with images, or "
            "text_list with image_info");
  EXPECT_EQ(wrong(R"({"texts": ["x"], "images": []})"),
            "the sequence has 1 texts for 0 images, expected as many, one of both null at each "
            "place");
  EXPECT_EQ(wrong(R"({"texts": ["x"], "images": ["a.png"]})"),
            "place 1 of the sequence has the text \"x\" and the image \"a.png\", expected one of "
            "both");
  EXPECT_EQ(wrong(R"({"texts": ["x"]})"), "the sequence has no images");
  EXPECT_EQ(wrong(R"({"text_list": ["x"], "image_info": [{"image_name": "a.png",
                      "matched_text_index": 1}]})"),
            "the image a.png stands before text 1, expected a number from 0 below 1");
  EXPECT_EQ(wrong("[]"), "the document is empty");
  EXPECT_EQ(wrong(R"({"t": ["x"], "i": ["a.png"], "m": []})",
                  type("SimilarityInterleavedSample",
                       "texts: 'json[t]', images: 'json[i]', matched_text_indices: 'json[m]'")),
            "matched_text_indices are not a number for each of 1 images");
}

TEST_F(EnergonFolders, Blends) {
  for (const char* name : {"x", "y", "z"}) folder_.write(cat(name, "/.nv-meta/dataset.yaml"), "");
  folder_.write("inner.yaml",
                "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    "
                "blend:\n    - {weight: 3, path: ./y}\n    - {weight: 1, path: z}\n  val: {path: "
                "z}\n");
  const std::string file = folder_.write(
      "blend.yaml",
      "__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n    - {weight: 1, path: x}\n    - "
      "{weight: 1, path: inner.yaml, split_part: train}\n  val:\n    path: inner.yaml\n");
  EXPECT_TRUE(is_energon_blend(file));
  EXPECT_THAT(read_energon_blend(file, "train"),
              ElementsAre("0.5", folder_ / "x", "0.375", folder_ / "y", "0.125", folder_ / "z"));
  EXPECT_THAT(read_energon_blend(file, "val"), ElementsAre(folder_ / "z"));
  EXPECT_THAT(read_energon_blend(file, "test"), ElementsAre());
  const auto refused = [&](const std::string& train) {
    folder_.write("blend.yaml", cat("__class__: MetadatasetV2\nsplits: {train: ", train, "}\n"));
    return error_of([&] { read_energon_blend(file, "train"); });
  };
  EXPECT_EQ(refused("{concat: []}"),
            file + ": concat is not built\nhint: blend and blend_epochized are");
  EXPECT_EQ(refused("{path: 's3://x'}"), file + ": s3://x is no local path: nothing is fetched");
  EXPECT_EQ(refused("{path: inner.yaml, split_part: test}"),
            folder_ / "inner.yaml" + ": splits has no test, which another blend reads");
  EXPECT_EQ(refused("{blend: [{weight: 0, path: x}]}"), file + ": a weight of a blend is 0");
  EXPECT_EQ(refused("{path: nowhere}"),
            folder_ / "nowhere" + ": is neither a blend nor a folder with .nv-meta/dataset.yaml");
  EXPECT_THAT(refused("{path: blend.yaml}"), testing::HasSubstr("lie more than 32 deep"));
  folder_.write("blend.yaml", "__class__: Metadataset\nsplits: {}\n");
  EXPECT_EQ(error_of([&] { read_energon_blend(file, "train"); }),
            file + ": a blend of type Metadataset is not built\nhint: MetadatasetV2 is");
}

}  // namespace
}  // namespace megatron
