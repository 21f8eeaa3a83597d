// For any bytes, an archive, a row with media and what Megatron-Energon says of a folder are read
// or refused with an Error that begins with their name, and members lie within the archive. The
// corpus: tests/golden/multimodal. A run is 6,000 archives, 20,000 rows and 400 folders, or
// MEGATRON_FUZZ_SECONDS for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "tests/fuzz/repeat.h"
#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

class MultimodalFuzz : public ::testing::Test {
 protected:
  size_t below(size_t limit) { return random_() % limit; }

  // `edges`: texts that are put in.
  std::string mutated(std::string bytes, size_t near, const std::vector<std::string>& edges) {
    for (size_t edits = below(5); edits > 0 && !bytes.empty(); --edits) {
      const size_t at = below(below(3) == 0 ? bytes.size() : std::min(bytes.size(), near));
      switch (below(6)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
          break;
        case 1:
          bytes.replace(at, 1 + below(12), edges[below(edges.size())]);
          break;
        case 2:
          bytes.erase(at, 1 + below(40));
          break;
        case 3:
          bytes.insert(below(bytes.size()), bytes.substr(at, 1 + below(600)));
          break;
        case 4:
          if (below(4) == 0) bytes.resize(at);
          break;
        default:
          bytes[at] = static_cast<char>(random_());
      }
    }
    return bytes;
  }

  // Most of the time: else nothing behind the checksum is reached.
  void repair_headers(std::string& bytes) {
    if (below(5) == 0) return;
    for (size_t at = 0; at + 512 <= bytes.size(); at += 512) {
      if (bytes.compare(at + 257, 5, "ustar") != 0) continue;
      unsigned sum = 8 * ' ';
      for (size_t i = 0; i < 512; ++i)
        if (i < 148 || i >= 156) sum += static_cast<uint8_t>(bytes[at + i]);
      for (size_t d = 6; d > 0; sum /= 8) bytes[at + 148 + --d] = static_cast<char>('0' + sum % 8);
      bytes[at + 154] = '\0';
    }
  }

  template <class Body>
  void read_or_refused(Body&& body) {
    try {
      body();
      ++read_;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("name")) << error.what();
      EXPECT_FALSE(holds_address(error.what())) << error.what();
      ++refused_;
    }
  }

  std::mt19937 random_;
  int read_ = 0, refused_ = 0;
};

TEST_F(MultimodalFuzz, Archives) {
  const auto corpus = golden_archives();
  const std::vector<std::string> edges = {"00000000000",
                                          "77777777777",
                                          "\x80\x7f\xff\xff\xff\xff\xff\xff",
                                          "x",
                                          "g",
                                          "L",
                                          "S",
                                          "5",
                                          "999999 path=a\n",
                                          "11 size=9\n",
                                          "22 GNU.sparse.major=1\n",
                                          std::string(512, '\0'),
                                          "../a",
                                          ".",
                                          "/"};
  repeat_with_seeds(6000, [&](uint32_t seed) {
    random_.seed(seed);
    std::string bytes = mutated(corpus[below(corpus.size())].bytes, 3000, edges);
    repair_headers(bytes);
    read_or_refused([&] {
      const std::vector<TarMember> members = read_tar(bytes_of(bytes), "name");
      for (const TarMember& member : members) {
        EXPECT_LE(member.offset, bytes.size());
        EXPECT_LE(member.size, bytes.size() - member.offset);
      }
      for (const ShardSample& sample : group_members(members, "name"))
        EXPECT_FALSE(sample.members.empty());
    });
  });
  EXPECT_GT(read_, 100);
  EXPECT_GT(refused_, 100);
}

TEST_F(MultimodalFuzz, Rows) {
  std::vector<std::string> corpus;
  for (const char* file : {"same/json/rows.json", "same/lines/rows.jsonl"}) {
    const std::string path = kGoldens + file;
    read_source_file(SourceKind::kJson, path,
                     [&](const SourceRow& row) { corpus.push_back(row.json); });
  }
  corpus.push_back(R"({"caption": "a \u00e9", "image": {"bytes": "QUJD", "path": null}})");
  const std::vector<std::string> edges = {"<image>",
                                          "<image-2>",
                                          "<audio>",
                                          "<image-99999999999999999999>",
                                          "null",
                                          "[",
                                          "]",
                                          "{}",
                                          "\"",
                                          "data:;base64,",
                                          "http://",
                                          "\\u0000",
                                          "\"type\": \"video\"",
                                          "-1e999",
                                          "\xff\xfe",
                                          "\\ud800"};
  const std::vector<RowMedium> members = {{MediaKind::kImage, "d/7.img1.png", {}},
                                          {MediaKind::kSound, "d/7.wav", {}}};
  repeat_with_seeds(20000, [&](uint32_t seed) {
    random_.seed(seed);
    const std::string json = mutated(corpus[below(corpus.size())], 400, edges);
    read_or_refused([&] {
      const MultimodalRow row =
          parse_multimodal_row(json, "name", below(4) == 0 ? members : std::vector<RowMedium>());
      EXPECT_FALSE(text_of(row).empty());
    });
  });
  EXPECT_GT(read_, 100);
  EXPECT_GT(refused_, 100);
}

TEST_F(MultimodalFuzz, FoldersOfEnergon) {
  const Folder folder;
  std::vector<std::string> corpora[3];
  const char* const files[] = {"dataset.yaml", "split.yaml", ".info.json"};
  for (const char* golden : {"energon/answering/", "energon/captions/"})
    for (size_t i = 0; i < 3; ++i) {
      const std::string meta = kGoldens + golden + ".nv-meta/" + files[i];
      const bool older = !std::filesystem::exists(meta);
      corpora[i].push_back(read_file(older ? kGoldens + golden + ".nv-meta/.info.yaml" : meta));
    }
  folder.write("a.tar", read_file(kGoldens + "energon/captions/a.tar"));
  for (int shard = 0; shard < 4; ++shard) {
    const std::string name = cat("shards/s_0", shard, ".tar");
    folder.write(name, read_file(kGoldens + "energon/answering/" + name));
  }
  const std::string blend =
      cat("__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n",
          "    - {weight: 1.5, path: ., subset: {range: [10%, 90%]}}\n",
          "    - {path: ., subset: {range: [1, end]}}\n",
          "    - join: [{path: .}, {path: ., nonmatch: skip}]\n",
          "      joiner: {__module__: megatron.energon, __class__: VQASample}\n");
  const std::vector<std::string> edges = {"{0..9}", "{a,b}",    "{{a,b},c{1..3}}",
                                          "[0]",    "[",        "]",
                                          "json",   ",",        ": ",
                                          "\n- ",   "&x [*x]",  "*x",
                                          "null",   "-1",       "1e99",
                                          "''",     "../",      "/",
                                          "~",      "!!binary "};
  int blends = 0;
  repeat_with_seeds(400, [&](uint32_t seed) {
    random_.seed(seed);
    const size_t which = below(2);
    for (size_t i = 0; i < 3; ++i)
      folder.write(cat(".nv-meta/", files[i]), mutated(corpora[i][which], 4000, edges));
    folder.write("blend.yaml", mutated(blend, 200, edges));
    const auto in_folder = [&](auto&& body) {
      read_or_refused([&] {
        try {
          body();
        } catch (const Error& error) {
          const std::string message = error.what();
          EXPECT_FALSE(holds_address(message)) << message;
          throw_error(message.starts_with(folder.path()) ? "name" : message);
        }
      });
    };
    in_folder([&] {
      const SourceFiles source = list_source_files(folder.path());
      for (size_t i = 0; i < source.paths.size(); ++i)
        read_source_file(source, i, [&](const SourceRow& row) {
          EXPECT_FALSE(row.container.empty() && row.json.empty());
        });
    });
    in_folder([&] {
      for (const std::string& path : read_energon_blend(folder / "blend.yaml", "train")) {
        if (path.find('/') == std::string::npos) continue;
        ++blends;
        const SourceFiles source = list_source_files(path);
        for (size_t i = 0; i < source.paths.size(); ++i)
          read_source_file(source, i, [](const SourceRow&) {});
      }
    });
  });
  EXPECT_GT(read_, 10);
  EXPECT_GT(refused_, 100);
}

}  // namespace
}  // namespace megatron
