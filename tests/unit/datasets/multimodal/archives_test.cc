// Archives and samples in them against Python's tarfile and webdataset (tests/golden/multimodal).
#include <gtest/gtest.h>

#include "tests/unit/datasets/multimodal/testing.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

std::vector<TarMember> members_of(const std::string& bytes) {
  return read_tar(bytes_of(bytes), "x.tar");
}
std::string tar_error(const std::string& bytes) {
  return error_of([&] { members_of(bytes); });
}
std::string group_error(const std::vector<std::pair<std::string, std::string>>& files) {
  return error_of([&] { group_members(members_of(tar_of(files)), "x.tar"); });
}

TEST(Tar, MembersLieWherePythonFindsThem) {
  int archives = 0;
  for (const GoldenArchive& archive : golden_archives()) {
    SCOPED_TRACE(archive.name);
    const std::vector<TarMember> members = members_of(archive.bytes);
    const auto& expected = archive.facts.at("members");
    ASSERT_EQ(members.size(), expected.size());
    for (size_t i = 0; i < members.size(); ++i) {
      EXPECT_EQ(members[i].name, expected[i].at("name").get<std::string>());
      EXPECT_EQ(members[i].offset, expected[i].at("offset"));
      EXPECT_EQ(members[i].size, expected[i].at("size"));
    }
    ++archives;
  }
  EXPECT_EQ(archives, 16);
}

TEST(Tar, SamplesAreThoseOfWebDataset) {
  for (const GoldenArchive& archive : golden_archives()) {
    SCOPED_TRACE(archive.name);
    std::vector<TarMember> members = members_of(archive.bytes);
    const std::vector<ShardSample> samples = group_members(members, "x.tar");
    const auto& expected = archive.facts.at("samples");
    ASSERT_EQ(samples.size(), expected.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(samples[i].key, expected[i].at("key").get<std::string>());
      std::vector<std::string> extensions;
      for (const ShardMember& member : samples[i].members) extensions.push_back(member.extension);
      EXPECT_EQ(nlohmann::json(extensions), expected[i].at("extensions"));
    }
  }
}

TEST(Tar, EveryCutIsAnErrorThatNamesTheByte) {
  const std::string whole = golden_archives()[2].bytes;
  // Behind the first of the two empty blocks of the end nothing is missing any more.
  const size_t end = members_of(whole).back().offset + 512 + 1024;
  for (size_t size = 0; size < end; size += 128) {
    const std::string error = tar_error(whole.substr(0, size));
    EXPECT_NE(error.find("x.tar: byte "), std::string::npos) << size;
    EXPECT_TRUE(error.find("cut") != std::string::npos || size == 0) << size << " " << error;
  }
  EXPECT_EQ(tar_error(""), "x.tar: byte 0: the file is empty, expected a tar archive");
  EXPECT_EQ(tar_error(tar_of({{"a.txt", std::string(600, 'x')}}).substr(0, 1024)),
            "x.tar: byte 0: the archive is cut: a.txt has 600 bytes, 512 are left");
  EXPECT_EQ(tar_error(tar_of({{"a.txt", "x"}}).substr(0, 1536)),
            "x.tar: byte 1536: the archive is cut: it ends before the two empty blocks at an "
            "archive's end");
}

TEST(Tar, DamageIsNamed) {
  std::string bytes = tar_of({{"a.txt", "x"}, {"b.txt", "y"}});
  bytes[1024 + 3] ^= 1;
  EXPECT_EQ(tar_error(bytes),
            "x.tar: byte 1024: the checksum of a header is wrong: the archive is damaged");
  EXPECT_EQ(tar_error("\xff\xd8" + std::string(2000, 'x')),
            "x.tar: byte 0: is no tar archive: the checksum of the first header is wrong");
  EXPECT_EQ(tar_error("\x1f\x8b" + std::string(2000, 'x')),
            "x.tar: byte 0: is gzip, expected an uncompressed tar archive");
  std::string gap = tar_of({{"a.txt", "x"}});
  gap.resize(1536);
  EXPECT_EQ(tar_error(gap + tar_of({{"b.txt", "y"}})),
            "x.tar: byte 1536: a member follows an empty block: the archive is damaged");
}

TEST(Tar, SparseMembersLinksAndDevicesAreRefused) {
  EXPECT_EQ(tar_error(tar_of({{"a.jpg", "x"}}, 'S')), "x.tar: byte 0: a.jpg is sparse");
  EXPECT_EQ(tar_error(tar_of({{"a.jpg", ""}}, '2')),
            "x.tar: byte 0: a.jpg is a link\nhint: archive the files that links point to (tar -h)");
  EXPECT_EQ(tar_error(tar_of({{"a.jpg", ""}}, '3')),
            "x.tar: byte 0: a.jpg is neither a file nor a folder: its type is \"3\"");
  const std::string records = "22 GNU.sparse.major=1\n";
  std::string pax = tar_of({{"p", records}}, 'x');
  pax.resize(pax.size() - 1024);
  EXPECT_EQ(tar_error(pax + tar_of({{"a.jpg", "x"}})), "x.tar: byte 1024: a.jpg is sparse");
}

TEST(Shard, BadKeysAndExtensionsAreNamed) {
  EXPECT_EQ(group_error({{"a.jpg", "1"}, {"b.jpg", "2"}, {"a.txt", "3"}}),
            "x.tar: byte 2560: member a.txt: the key a comes back after another key\n"
            "hint: the members of a sample follow each other, as tar --sort=name writes them");
  EXPECT_EQ(group_error({{"a.jpg", "1"}, {"a.JPG", "2"}}),
            "x.tar: byte 1536: member a.JPG: the sample a has the extension jpg twice");
  EXPECT_EQ(group_error({{"d.x/readme", "1"}}),
            "x.tar: byte 512: member d.x/readme has no extension, expected KEY.EXTENSION");
}

TEST(Shard, MediaComeInTheOrderOfTheirNumbers) {
  const std::string bytes = tar_of({{"k.img10.png", "c"},
                                    {"k.jpg", "a"},
                                    {"k.img2.JPEG", "b"},
                                    {"k.3.wav", "s"},
                                    {"k.txt", "t"},
                                    {"k.cls", "9"}});
  const std::vector<ShardSample> samples = group_members(members_of(bytes), "x.tar");
  ASSERT_EQ(samples.size(), 1U);
  std::string order;
  for (const ShardMember* member : samples[0].media(MemberKind::kImage))
    order += bytes[member->place.offset];
  EXPECT_EQ(order, "abc");
  EXPECT_EQ(samples[0].media(MemberKind::kSound).size(), 1U);
  EXPECT_EQ(samples[0].find("cls")->kind, MemberKind::kOther);
}

}  // namespace
}  // namespace megatron
