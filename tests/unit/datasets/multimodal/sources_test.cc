// Files of rows: the same samples whatever they lie in, and where their media are.
#include <gtest/gtest.h>

#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;
namespace fs = std::filesystem;

// A sample with the bytes of its media in the place of their names.
std::string content_of(SourceSample sample) {
  for (size_t i = 0; i < sample.places.size(); ++i) {
    RowMedium& medium = sample.row.media[i];
    if (!sample.places[i].path.empty()) medium.bytes = read_range(sample.places[i], sample.name);
    medium.path.clear();
  }
  return text_of(sample.row);
}

std::vector<std::string> contents_of(const std::string& path, const std::string& root = "") {
  std::vector<std::string> out;
  for (const SourceSample& sample : read_all(path, root)) out.push_back(content_of(sample));
  return out;
}

std::string source_error(const std::string& path, const std::string& root) {
  return error_of([&] { read_all(path, root); });
}

std::string one_image(const std::string& path) {
  return R"({"image": ")" + path + R"(", "caption": "c"})" + "\n";
}

TEST(Sources, TheSameContentGivesTheSameSamples) {
  const std::vector<std::string> rows =
      contents_of(kGoldens + "same/json/rows.json", kGoldens + "same/json/media");
  ASSERT_EQ(rows.size(), 5U);
  EXPECT_EQ(rows[2], "user Only words. | assistant So be it.");
  EXPECT_NE(rows[3].find("[sound:RIFF"), std::string::npos);
  EXPECT_EQ(contents_of(kGoldens + "same/tar"), rows);
  EXPECT_EQ(contents_of(kGoldens + "same/lines/rows.jsonl"), rows);
}

TEST(Sources, ParquetGivesTheSameSamples) {
  EXPECT_EQ(contents_of(kGoldens + "same/parquet"),
            contents_of(kGoldens + "same/json/rows.json", kGoldens + "same/json/media"));
}

TEST(Sources, RowsAreNamedByTheirPlace) {
  const auto name = [](const std::string& path, size_t i) {
    return read_all(path, kGoldens + "same/json/media").at(i).name;
  };
  EXPECT_EQ(name(kGoldens + "same/tar", 3), kGoldens + "same/tar/shard-1.tar: s/003");
  EXPECT_EQ(name(kGoldens + "same/json/rows.json", 3), kGoldens + "same/json/rows.json: row 4");
  EXPECT_EQ(name(kGoldens + "same/lines/rows.jsonl", 3),
            kGoldens + "same/lines/rows.jsonl: line 4");
}

TEST(Sources, CaptionsOfShards) {
  const Folder folder;
  folder.write("a.tar", tar_of({{"1.jpg", "J"},
                                {"1.txt", "a cat"},
                                {"2.png", "P"},
                                {"2.json", R"({"caption": "a dog"})"},
                                {"3.jpg", "K"},
                                {"3.json", R"({"url": "http://x"})"},
                                {"3.txt", "t"}}));
  EXPECT_EQ(contents_of(folder.path()),
            (std::vector<std::string>{"[image:J] a cat", "[image:P] a dog", "[image:K] t"}));
  folder.write("a.tar", tar_of({{"1.jpg", "J"}}));
  EXPECT_EQ(source_error(folder.path(), ""),
            folder / "a.tar" + ": 1: has neither a caption (.txt) nor a row (.json); it has jpg");
  folder.write("a.tar", tar_of({{"1.jpg", ""}, {"1.txt", "t"}}));
  EXPECT_EQ(source_error(folder.path(), ""), folder / "a.tar" + ": 1: byte 512: 1.jpg has 0 bytes");
}

TEST(Sources, PathsStayBelowTheFolderOfMedia) {
  const Folder folder;
  folder.write("media/in/a.png", "A");
  folder.write("secret.png", "S");
  fs::create_symlink(folder / "secret.png", folder / "media/out.png");
  fs::create_symlink(folder / "media/in/a.png", folder / "media/same.png");
  const std::string root = folder / "media";
  const auto error = [&](const std::string& path) {
    const std::string file = folder.write("rows.jsonl", one_image(path));
    return source_error(file, root).substr(file.size());
  };
  const auto leaves = [&](const std::string& path) {
    return ": line 1: the path " + path + " leaves the folder of media " + root;
  };
  EXPECT_EQ(error("../secret.png"), leaves("../secret.png"));
  EXPECT_EQ(error("in/../in/a.png"), leaves("in/../in/a.png"));
  EXPECT_EQ(error(folder / "secret.png"), leaves(folder / "secret.png"));
  EXPECT_EQ(error("out.png"),
            leaves("out.png") + " by a link, to " + fs::canonical(folder / "secret.png").string());
  EXPECT_NE(error("none.png").find("there is no file"), std::string::npos);
  EXPECT_NE(error("in").find("is no file"), std::string::npos);
  folder.write("media/empty.png", "");
  EXPECT_NE(error("empty.png").find("has 0 bytes"), std::string::npos);
  for (const std::string& path :
       {std::string("in/a.png"), std::string("same.png"), root + "/in/a.png"})
    EXPECT_EQ(contents_of(folder.write("rows.jsonl", one_image(path)), root),
              std::vector<std::string>{"[image:A] c"});
}

TEST(Sources, ListsThatAreCutAreNamed) {
  const Folder folder;
  const std::string row = one_image("a.png");
  folder.write("a.png", "A");
  EXPECT_EQ(source_error(folder.write("a.json", "[" + row + "," + row.substr(0, 9)), folder.path()),
            folder / "a.json" + ": the list of rows is cut: it has no end; 1 rows are whole");
  EXPECT_EQ(
      source_error(folder.write("a.json", "[" + row + "] x"), folder.path()),
      cat(folder / "a.json", ": byte ", row.size() + 2, ": something follows the list of rows"));
  EXPECT_EQ(source_error(folder.write("a.json", "[7]"), ""),
            folder / "a.json" + ": byte 1: an element of the list of rows is no object");
  EXPECT_EQ(source_error(folder.write("a.txt", "x"), ""),
            folder / "a.txt" + ": is none of .tar, .parquet, .json and .jsonl");
}

TEST(Sources, AFileThatBecameShorterIsNamed) {
  const Folder folder;
  const std::string path = folder.write("a.bin", "0123456789");
  EXPECT_EQ(read_range({path, 3, 4}, "s"), "3456");
  EXPECT_EQ(error_of([&] { read_range({path, 8, 4}, "s"); }),
            "s: " + path +
                " ends at byte 10, the medium at byte 12\nhint: the file has changed "
                "since it was indexed");
}

}  // namespace
}  // namespace megatron
