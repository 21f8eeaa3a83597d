// Subsets, joins and blends of folders of Megatron-Energon: the samples that it reads itself
// (tests/golden/multimodal/make_metadatasets.py), through the index, and what is wrong in them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>

#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "megatron/media/image_header.h"
#include "tests/unit/datasets/multimodal/indexed.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;
using testing::ElementsAre;
using testing::HasSubstr;

std::string image_bytes(const std::string& name) {
  return read_file(kGoldens + "same/json/media/" + name);
}

std::string meta_of_type(const std::string& type) {
  const bool image = type != "TextSample";
  Json fields = Json::object();
  if (image) fields["image"] = "png,jpg,webp";
  if (type == "CaptioningSample") fields["caption"] = "txt";
  if (type == "TextSample") fields["text"] = "txt";
  if (type == "VQASample") fields.update({{"context", "txt"}, {"answers", "json[a]"}});
  return Json{{"sample_type", {{"__class__", type}}}, {"field_map", fields}}.dump();
}

// As make_metadatasets.py has it: shards by their keys.
void write_energon(const Folder& root, const std::string& name, const Json& given) {
  Json parts = {{"train", Json::array()}, {"val", Json::array()}}, counts = Json::object();
  const std::string image = given["image"], end = image.substr(image.rfind('.'));
  std::vector<std::string> shards;
  for (size_t s = 0; s < given["shards"].size(); ++s) {
    std::vector<std::pair<std::string, std::string>> members;
    for (const std::string key : given["shards"][s]) {
      members.emplace_back(key + end, image_bytes(image));
      members.emplace_back(key + ".txt", cat(name, " ", key));
      members.emplace_back(key + ".json", Json{{"a", "answer " + key}}.dump());
    }
    shards.push_back(cat("s", s, ".tar"));
    root.write(cat(name, "/", shards.back()), tar_of(members));
    counts[shards.back()] = given["shards"][s].size();
  }
  const auto train = given["train"].get<std::vector<size_t>>();
  for (const size_t s : train) parts["train"].push_back(shards[s]);
  for (size_t s = 0; s < shards.size(); ++s)
    if (std::ranges::find(train, s) == train.end()) parts["val"].push_back(shards[s]);
  const Json split = {{"split_parts", parts}, {"exclude", given["exclude"]}};
  root.write(name + "/.nv-meta/dataset.yaml", meta_of_type(given["type"]));
  root.write(name + "/.nv-meta/split.yaml", split.dump());
  root.write(name + "/.nv-meta/.info.json", Json{{"shard_counts", counts}}.dump());
}

std::string write_blend(const Folder& root, const std::string& name, const Json& train) {
  return root.write(name,
                    Json{{"__class__", "MetadatasetV2"}, {"splits", {{"train", train}}}}.dump());
}

// "KEY: HxW text"
std::string line_of(const SourceSample& sample) {
  const std::string bytes = read_range(sample.places.at(0), sample.name);
  const ImageSize size =
      read_image_header({{reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, "image"})
          .size();
  std::string text = sample.row.caption;
  for (const RowMessage& message : sample.row.messages)
    for (const RowPart& part : message.parts)
      text += (message.is_assistant ? ", " : "") +
              (part.text.starts_with('\n') ? part.text.substr(1) : part.text);
  return cat(sample.name.substr(sample.name.rfind(' ') + 1), ": ", size.height, "x", size.width,
             " ", text);
}

// Of a source, in an epoch of training without a part of a repetition.
std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> out;
  const SourceFiles files = list_source_files(path);
  size_t part = 0;
  for (size_t i = 0; i < files.paths.size(); ++i) {
    const std::vector<RepeatedFiles>& repetitions = files.energon->repetitions();
    while (i >= repetitions[part].end) ++part;
    read_source_file(files, i, [&](const SourceRow& row) {
      const SourceSample sample = read_sample(row, "");
      out.insert(out.end(), static_cast<size_t>(repetitions[part].times), line_of(sample));
    });
  }
  return out;
}

TEST(EnergonBlends, ReadWhatEnergonReads) {
  size_t refused = 0, read = 0;
  const Json golden = Json::parse(read_file(kGoldens + "metadatasets.json"));
  for (const Json& given : golden["cases"]) {
    const std::string name = given["name"];
    if (given["samples"].is_object()) continue;  // of parts of repetitions numbers alone
    SCOPED_TRACE(name);
    const Folder root;
    for (const auto& [folder, content] : golden["sets"][given["set"].get<size_t>()].items())
      write_energon(root, folder, content);
    const std::string file = write_blend(root, "m.yaml", given["train"]);
    std::vector<std::string> own;
    const std::string error = error_of([&] {
      for (const std::string& path : read_energon_blend(file, "train"))
        if (path.find('/') != std::string::npos)
          for (std::string& line : lines_of(path)) own.push_back(std::move(line));
    });
    if (given["samples"].empty()) {
      ++refused;
      EXPECT_FALSE(error.empty());
      continue;
    }
    ++read;
    EXPECT_EQ(error, "");
    if (given["train"].contains("blend") || given["train"].contains("blend_epochized"))
      std::ranges::sort(own);
    EXPECT_EQ(own, given["samples"].get<std::vector<std::string>>());
  }
  EXPECT_GE(read, 16U);
  EXPECT_GE(refused, 8U);
}

// Images of one folder and texts of another, in another order, are the captions that rows have.
TEST_F(Indexed, JoinedFoldersGiveTheSameSamples) {
  const auto rows = index(write_rows("rows.jsonl", 0, 30));
  std::vector<std::pair<std::string, std::string>> images[2], texts[2];
  for (int64_t i = 0; i < 30; ++i) {
    const std::string name = image_of(i), end = name.substr(name.rfind('.'));
    images[i < 17 ? 0 : 1].emplace_back(cat(i, end), image_bytes(name));
    texts[i < 5 ? 1 : 0].emplace_back(cat(29 - i, ".txt"), caption_of(29 - i));
  }
  const auto write = [&](const char* folder, const char* type, const auto& shards) {
    for (int s = 0; s < 2; ++s) folder_.write(cat(folder, "/", s, ".tar"), tar_of(shards[s]));
    folder_.write(cat(folder, "/.nv-meta/dataset.yaml"), meta_of_type(type));
    folder_.write(cat(folder, "/.nv-meta/split.yaml"), "split_parts: {train: ['{0..1}.tar']}");
    folder_.write(cat(folder, "/.nv-meta/.info.json"),
                  cat(R"({"shard_counts": {"0.tar": )", shards[0].size(), R"(, "1.tar": )",
                      shards[1].size(), "}}"));
  };
  write("images", "ImageSample", images);
  write("texts", "TextSample", texts);
  const Json joiner = {{"__module__", "megatron.energon"}, {"__class__", "OCRSample"}};
  const Json join = {{"join", {{{"path", "images"}}, {{"path", "texts"}}}}, {"joiner", joiner}};
  const std::string file = write_blend(folder_, "join.yaml", join);
  EXPECT_THAT(read_energon_blend(file, "train"), ElementsAre(file + "#0"));
  for (const bool from_cache : {false, true}) {
    const auto joined = index(file);
    ASSERT_EQ(joined->size(), 30) << from_cache;
    EXPECT_EQ(joined->name(3), folder_ / "images/0.tar" + ": 3");
    for (int64_t i = 0; i < 30; ++i) {
      EXPECT_EQ(joined->sample(i).ids, rows->sample(i).ids);
      EXPECT_EQ(joined->bytes(i, 0), rows->bytes(i, 0));
    }
  }
  // In the same order, whatever the layout, and from any place on.
  const auto expected = stream(dataset(rows, {.sequence_length = 40}, 48), 1, 0, 0, 24);
  const auto data = dataset(index(file), {.sequence_length = 40}, 48);
  EXPECT_EQ(stream(data, 3, 8, 0, 24), expected);
  EXPECT_TRUE(std::ranges::equal(stream(data, 2, 1, 12, 24), std::span(expected).subspan(12)));
  // Texts that have the images of other shards.
  Json turned = join;
  std::swap(turned["join"][0], turned["join"][1]);
  const auto joined = index(write_blend(folder_, "turned.yaml", turned) + "#0");
  for (int64_t i = 0; i < 30; ++i) {
    const int64_t last = i < 25 ? 24 - i : 54 - i;  // of shard 0, of shard 1
    EXPECT_EQ(joined->sample(i).ids, rows->sample(last).ids);
    EXPECT_EQ(joined->bytes(i, 0), rows->bytes(last, 0));
  }
  // A text of the joined folder is another index.
  texts[0][0].second = "other";
  write("texts", "TextSample", texts);
  EXPECT_NE(index(file)->description(), joined->description());
  EXPECT_NE(index(file)->sample(24).ids, rows->sample(24).ids);
}

// Each epoch has samples as often as they are repeated, and of a part of a repetition others.
TEST_F(Indexed, RepeatedSamplesFillAnEpoch) {
  const Json golden = Json::parse(read_file(kGoldens + "metadatasets.json"));
  for (const Json& given : golden["cases"]) {
    if (!given["samples"].is_object()) continue;
    for (const auto& [name, content] : golden["sets"][given["set"].get<size_t>()].items())
      write_energon(folder_, name, content);
    const auto all = index(write_blend(folder_, "m.yaml", given["train"]));
    ASSERT_EQ(all->size(), 6);
    EXPECT_EQ(all->repetitions().size(), 2U);
    // A sample in each sequence: five of the first folder and one of the other.
    const auto data = dataset(all, {.sequence_length = 12}, 60);
    EXPECT_EQ(data->counts().samples, 6);
    EXPECT_EQ(data->counts().drawn, 6);
    ASSERT_EQ(data->size(), 60);
    std::set<std::vector<int64_t>> epochs;
    for (int64_t epoch = 0; epoch < 10; ++epoch) {
      std::vector<int64_t> times(6);
      for (int64_t i = 6 * epoch; i < 6 * epoch + 6; ++i) {
        ASSERT_EQ(data->runs(i).size(), 1U);
        ++times[static_cast<size_t>(data->runs(i)[0].sample)];
      }
      EXPECT_EQ(times[0] + times[1] + times[2], given["samples"]["a"]);
      EXPECT_EQ(times[3] + times[4] + times[5], given["samples"]["b"]);
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(times[i] == 1 || times[i] == 2);
      epochs.insert(times);
    }
    EXPECT_GT(epochs.size(), 3U);
    Json more = given["train"];
    more["blend_epochized"][0]["repetitions"] = 2;
    const auto other = index(write_blend(folder_, "more.yaml", more));
    EXPECT_EQ(other->description(), all->description());
    EXPECT_NE(dataset(other, {.sequence_length = 12}, 60)->description(), data->description());
    const std::vector<std::string> expected = stream(data, 1, 0, 0, 48);
    EXPECT_EQ(stream(data, 3, 8, 0, 48), expected);
    EXPECT_TRUE(std::ranges::equal(stream(data, 2, 1, 24, 48), std::span(expected).subspan(24)));
    // Validation has each once.
    const MultimodalDataset valid(all, {0, 1}, Split::kValid, {}, {.sequence_length = 12});
    EXPECT_EQ(valid.size(), 6);
  }
}

class EnergonErrors : public testing::Test {
 protected:
  EnergonErrors() {
    const auto write = [&](const char* name, const char* type, const char* shards) {
      write_energon(root_, name,
                    {{"type", type},
                     {"image", "0_img1.png"},
                     {"shards", Json::parse(shards)},
                     {"train", {0, 1}},
                     {"exclude", Json::array()}});
    };
    write("a", "CaptioningSample", R"([["0", "1"], ["2"]])");
    write("i", "ImageSample", R"([["0", "1"], ["2"]])");
    write("t", "TextSample", R"([["0"], ["2"]])");
    write("twice", "TextSample", R"([["0", "1"], ["2", "1"]])");
  }
  // What reading all of a blend says, without its folder.
  std::string error(const std::string& train) {
    const std::string file =
        root_.write("m.yaml", cat("__class__: MetadatasetV2\nsplits:\n  train: ", train, "\n"));
    std::string message = error_of([&] {
      for (const std::string& path : read_energon_blend(file, "train"))
        if (path.find('/') != std::string::npos) lines_of(path);
    });
    for (const std::string root = root_ / ""; message.find(root) != std::string::npos;)
      message.erase(message.find(root), root.size());
    return message;
  }
  static std::string join(const std::string& list, const std::string& type = "OCRSample") {
    return cat("{join: [", list, "], joiner: {__module__: megatron.energon, __class__: ", type,
               "}}");
  }

  Folder root_;
};

TEST_F(EnergonErrors, Subsets) {
  const std::string hint =
      "\nhint: range: [10%, 90%], or samples [100, 200] or [100, end] of a folder";
  EXPECT_EQ(error("{path: a, subset: {range: [2, 4]}}"),
            "m.yaml: the part train of a: the subset of samples 2 to 4 ends beyond the 3 samples "
            "that there are");
  EXPECT_EQ(error("{path: a, subset: {range: [10%, 30%]}}"),
            "m.yaml: the part train of a: the subset holds none of the 3 samples");
  EXPECT_EQ(error("{path: a, subset: {range: [90%, 30%]}}"),
            "m.yaml: the range [\"90%\",\"30%\"] of a subset ends before it begins");
  for (const char* range : {R"([-1,2])", R"(["10%","end"])", R"([1,"50%"])", R"(["1","2"])",
                            R"(["0%","101%"])", "[1.5,2]", R"(["nan%","50%"])"})
    EXPECT_EQ(error(cat("{path: a, subset: {range: ", range, "}}")),
              cat("m.yaml: the range ", range, " of a subset is none", hint));
  EXPECT_EQ(error("{path: a, subset: {share: 1}}"),
            "m.yaml: the subset {\"share\":1} is none" + hint);
  const std::string blend = "m.yaml: a range of samples is one of a folder, not of a blend" + hint;
  EXPECT_EQ(error("{subset: {range: [0, 1]}, blend: [{path: a}]}"), blend);
  root_.write("inner.yaml", "__class__: MetadatasetV2\nsplits: {train: {path: a}}\n");
  EXPECT_EQ(error("{path: inner.yaml, subset: {range: [0, 1]}}"), blend);
  EXPECT_EQ(error("{path: a, split_part: other}"),
            "a/.nv-meta/split.yaml: split_parts has no other");
  EXPECT_EQ(error("{path: a, split_config: other.yaml}"), "a/.nv-meta: has no file other.yaml");
}

TEST_F(EnergonErrors, Joins) {
  EXPECT_EQ(error(join("{path: i}, {path: t}")),
            "i/s0.tar: 1: the part train of t has no sample of this key to join\nhint: nonmatch: "
            "skip leaves such samples out, none joins the others");
  EXPECT_EQ(error(join("{path: i}, {path: t, nonmatch: none}")),
            "i/s0.tar: 1: has no text: the data set that has it lacks the key\nhint: nonmatch: "
            "skip leaves such samples out");
  EXPECT_EQ(error(join("{path: i}, {path: twice}")),
            "twice/s1.tar: 1: the key is also one of twice/s0.tar\nhint: a join needs keys of "
            "which a folder has each once");
  EXPECT_EQ(error(join("{path: i}, {path: t, split_part: none}")),
            "t/.nv-meta/split.yaml: split_parts has no none");
  EXPECT_EQ(error(join("{path: i}, {path: t}", "CaptioningSample")),
            "m.yaml: the joiner CaptioningSample has no field text, which t has\nhint: its fields "
            "are caption, image");
  EXPECT_EQ(error(join("{path: i}")),
            "m.yaml: no data set of the join has the field text of its joiner OCRSample");
  EXPECT_EQ(error(join("{path: i, nonmatch: skip}, {path: t}")),
            "m.yaml: nonmatch is for the members of a join behind the first, whose samples are the "
            "ones that are joined");
  EXPECT_EQ(error(join("{path: i}, {path: t, nonmatch: drop}")),
            "m.yaml: nonmatch of a join is drop, expected skip, none or error");
  EXPECT_EQ(error(join("{path: i}, {path: t, subset: {range: [0, 1]}}")),
            "m.yaml: a member of a join has a subset\nhint: a join as a whole may have one");
  EXPECT_EQ(error(join("{path: i}, {path: m.yaml}")),
            "m.yaml: is no folder with .nv-meta/dataset.yaml, which a join needs");
  EXPECT_THAT(error("{join: {x: {path: i}}, joiner: {__module__: megatron.energon, __class__: "
                    "OCRSample}}"),
              HasSubstr("m.yaml: a join is no list of data sets"));
  for (const char* joiner : {"{__module__: joiners, __function__: f}", "null",
                             "{__module__: joiners, __class__: OCRSample}"})
    EXPECT_THAT(error(cat("{join: [{path: i}], joiner: ", joiner, "}")),
                HasSubstr("a program or none, which is not run"));
  EXPECT_EQ(error(join("{path: i}, {path: t, nonmatch: skip}, {path: i, nonmatch: none}")), "");
  EXPECT_EQ(error("{path: t}"), "t: samples of type TextSample are read in joins alone");
}

TEST_F(EnergonErrors, Blends) {
  EXPECT_EQ(error("{blend: [{blend_epochized: [{path: a}]}]}"),
            "m.yaml: blend and blend_epochized lie within one another: weights and numbers of "
            "repetitions do not mix");
  EXPECT_EQ(error("{blend_epochized: [{path: a, repetitions: 0}]}"),
            "m.yaml: repetitions of a blend is 0");
  EXPECT_EQ(error("{blend_epochized: [{path: a, repetitions: 1e9}]}"),
            "m.yaml: repetitions of a blend are more than 1000");
  EXPECT_EQ(error("{concat: [{path: a}]}"),
            "m.yaml: concat is not built\nhint: blend and blend_epochized are");
  EXPECT_EQ(error("{path: a, shuffle_over_epochs_multiplier: 2}"),
            "m.yaml: shuffle_over_epochs_multiplier of a data set is not built: each epoch has "
            "every sample once");
  EXPECT_EQ(error("{blend: [{path: a}, {path: a, subset: {range: [0, 1]}}]}"), "");
  const std::string file = root_ / "m.yaml";
  EXPECT_THAT(read_energon_blend(file, "train"),
              ElementsAre("0.5", root_ / "a", "0.5", file + "#1"));
  EXPECT_EQ(error_of([&] { list_source_files(file); }),
            cat(file, ": is a blend of 2 data sets by weights\nhint: ", file, "#0 to ", file,
                "#1 name its members"));
  EXPECT_EQ(error_of([&] { list_source_files(file + "#2"); }),
            file + "#2: the blend has 2 members, from 0");
  EXPECT_EQ(error_of([&] { list_source_files(file + "#0", "val"); }), file + ": splits has no val");
}

}  // namespace
}  // namespace megatron
