// Folders of Megatron-Energon: the samples that it reads in them itself
// (tests/golden/multimodal/make_energon.py), and what is wrong in them.
#include "megatron/datasets/multimodal/energon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  for (const std::string& file : files.paths)
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
            "CaptioningSample and VQASample are");
  EXPECT_EQ(error("__class__: VQAWebdataset\nsample_loader: x.py:f\n"),
            ".nv-meta/dataset.yaml: has a sample_loader, a program that makes samples, which is "
            "not run\nhint: a field_map says where the fields lie");
  EXPECT_EQ(error(type("CaptioningSample", "image: png")),
            ".nv-meta/dataset.yaml: field_map has no caption");
  EXPECT_EQ(error(type("CaptioningSample", "picture: png")),
            ".nv-meta/dataset.yaml: CaptioningSample has no field picture\nhint: its fields are "
            "caption, image");
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
  EXPECT_EQ(refused("{join: []}"), file + ": join is not built\nhint: blend is");
  EXPECT_EQ(refused("{path: 's3://x'}"), file + ": s3://x is no local path: nothing is fetched");
  EXPECT_EQ(refused("{path: x, split_part: val}"),
            file + ": split_part \"val\" within train is not built");
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
