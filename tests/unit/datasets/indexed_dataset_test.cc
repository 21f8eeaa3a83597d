// The indexed file format: bytes, both ways of reading, merging, and a clear error for each kind of
// damage.
#include "megatron/datasets/indexed_dataset.h"

#include <cstring>
#include <fstream>

#include "megatron/base/files.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/npy.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

// Two documents (sequences of 3 and 0; of 2) and an empty one between them.
void write_small(const std::string& prefix, IndexedType type = IndexedType::kUInt16,
                 bool multimodal = false) {
  IndexedDatasetBuilder builder(prefix, type, multimodal);
  builder.add_sequence(Longs{1, 2, 3}, 0);
  builder.add_sequence(Longs{}, 1);
  builder.end_document();
  builder.end_document();
  builder.append(Longs{100});
  builder.append(Longs{4});
  builder.end_sequence(0);
  builder.end_document();
  builder.finish();
}

void overwrite(const std::string& path, int64_t offset, const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(offset);
  file.write(bytes.data(), bytes.size());
}

std::string u64(uint64_t value) { return {reinterpret_cast<const char*>(&value), 8}; }

TEST(IndexedDataset, WritesTheDocumentedBytes) {
  TempFolder folder;
  write_small(folder / "d");
  EXPECT_EQ(folder.files(), (std::vector<std::string>{"d.bin", "d.idx"}));
  EXPECT_EQ(read_file(folder / "d.bin"), std::string("\1\0\2\0\3\0\144\0\4\0", 10));
  std::string expected("MMIDIDX\0\0\1\0\0\0\0\0\0\0\10", 18);
  expected += u64(3) + u64(4);
  for (const int32_t length : {3, 0, 2}) expected.append(reinterpret_cast<const char*>(&length), 4);
  for (const uint64_t value : {0, 6, 6}) expected += u64(value);
  for (const uint64_t value : {0, 2, 2, 3}) expected += u64(value);
  EXPECT_EQ(read_file(folder / "d.idx"), expected);
}

TEST(IndexedDataset, ReadsBackThroughMapAndFile) {
  TempFolder folder;
  for (const IndexedType type : {IndexedType::kUInt8, IndexedType::kInt8, IndexedType::kInt16,
                                 IndexedType::kInt32, IndexedType::kInt64, IndexedType::kUInt16}) {
    for (const bool mmap : {true, false}) {
      const std::string prefix = folder / to_string(type);
      write_small(prefix, type);
      const IndexedDataset data(prefix, {.mmap = mmap});
      EXPECT_EQ(data.type(), type);
      EXPECT_EQ(data.num_sequences(), 3);
      EXPECT_EQ(data.num_documents(), 3);
      EXPECT_EQ(data.num_tokens(), 5);
      EXPECT_EQ(data.read(0), (Longs{1, 2, 3}));
      EXPECT_EQ(data.read(1), Longs{});
      EXPECT_EQ(data.read(2), (Longs{100, 4}));
      Longs part(2);
      data.read(0, 1, part);
      EXPECT_EQ(part, (Longs{2, 3}));
      EXPECT_EQ(data.document_of(1), 0);
      EXPECT_EQ(data.document_of(2), 2);
      EXPECT_THAT(error_of([&] { data.read(0, 2, part); }),
                  HasSubstr("elements [2, 2 + 2) reach beyond sequence 0 of length 3"));
      EXPECT_THAT(error_of([&] { data.read(3); }), HasSubstr("there is no sequence 3 of 3"));
    }
  }
}

TEST(IndexedDataset, KeepsModes) {
  TempFolder folder;
  write_small(folder / "d", IndexedType::kInt32, true);
  const IndexedDataset data(folder / "d", {.multimodal = true});
  EXPECT_EQ(data.mode(0), 0);
  EXPECT_EQ(data.mode(1), 1);
  merge_indexed_datasets(std::vector{folder / "d", folder / "d"}, folder / "m", true);
  EXPECT_EQ(IndexedDataset(folder / "m", {.multimodal = true}).mode(4), 1);
}

TEST(IndexedDataset, MergesDocumentsAndSequences) {
  TempFolder folder;
  write_small(folder / "a");
  IndexedDatasetBuilder empty(folder / "b", IndexedType::kUInt16);
  empty.end_document();
  empty.finish();
  merge_indexed_datasets(std::vector{folder / "a", folder / "b", folder / "a"},
                         folder / "out" + "/m");
  const IndexedDataset data(folder / "out/m");
  EXPECT_EQ(Longs(data.document_indices().begin(), data.document_indices().end()),
            (Longs{0, 2, 2, 3, 3, 5, 5, 6}));
  EXPECT_EQ(data.read(3), (Longs{1, 2, 3}));
  EXPECT_EQ(data.read(5), (Longs{100, 4}));
  write_small(folder / "c", IndexedType::kInt32);
  EXPECT_THAT(error_of([&] {
                merge_indexed_datasets(std::vector{folder / "a", folder / "c"}, folder / "n");
              }),
              HasSubstr("has elements of type i32, the output has u16"));
  EXPECT_FALSE(indexed_dataset_exists(folder / "n"));
}

TEST(IndexedDataset, AnUnfinishedBuilderLeavesNothing) {
  TempFolder folder;
  {
    IndexedDatasetBuilder builder(folder / "d", IndexedType::kUInt16);
    builder.add_sequence(Longs{1, 2});
  }
  EXPECT_EQ(folder.files(), std::vector<std::string>{});
  IndexedDatasetBuilder builder(folder / "d", IndexedType::kUInt8);
  EXPECT_THAT(error_of([&] { builder.append(Longs{256}); }),
              HasSubstr("token id 256 does not fit the element type, whose largest value is 255"));
  EXPECT_THAT(error_of([&] { builder.append(Longs{-1}); }), HasSubstr("token id -1 does not fit"));
  IndexedDatasetBuilder open(folder / "e", IndexedType::kUInt8);
  open.add_sequence(Longs{1});
  EXPECT_THAT(error_of([&] { open.finish(); }),
              HasSubstr("1 sequences follow the end of the last document"));
}

TEST(IndexedDataset, ChoosesTheTypeByVocabulary) {
  EXPECT_EQ(indexed_type_for_vocabulary(65499), IndexedType::kUInt16);
  EXPECT_EQ(indexed_type_for_vocabulary(65500), IndexedType::kInt32);
}

// One damaged field each: where, what is written there, and what the message must say.
struct Damage {
  const char* file;
  int64_t offset;
  std::string bytes;
  const char* message;
};

TEST(IndexedDataset, NamesEveryDamagedField) {
  const Damage damages[] = {
      {"d.idx", 0, "X", "are not the mark \"MMIDIDX\\0\\0\""},
      {"d.idx", 9, u64(2), "version at offset 9 is 2, expected 1"},
      {"d.idx", 17, "\x09", "element type at offset 17 is 9, expected 1 to 8"},
      {"d.idx", 18, u64(~0ULL), "number of sequences at offset 18 is 18446744073709551615"},
      {"d.idx", 18, u64(4),
       "number of document entries at offset 26 is 4, which needs 8 bytes each; 20 bytes are left"},
      {"d.idx", 26, u64(0), "number of document entries at offset 26 is 0, expected at least 1"},
      {"d.idx", 26, u64(1ULL << 60),
       "number of document entries at offset 26 is 1152921504606846976"},
      {"d.idx", 34, std::string("\xff\xff\xff\xff", 4),
       "length of sequence 0 at offset 34 is -1, expected at least 0"},
      {"d.idx", 34, std::string("\xff\xff\xff\x7f", 4),
       "sequence 0 ends at byte 4294967294 but the file has 10 bytes"},
      {"d.idx", 46, u64(2), "position of sequence 0 at offset 46 is 2, expected 0"},
      {"d.idx", 62, u64(~0ULL), "position of sequence 2 at offset 62 is -1, expected 6"},
      {"d.idx", 70, u64(1), "document entry 0 at offset 70 is 1, expected 0"},
      {"d.idx", 78, u64(9), "document entry 1 at offset 78 is 9, expected 0 to 3"},
      {"d.idx", 86, u64(1), "document entry 2 at offset 86 is 1, expected 2 to 3"},
      {"d.idx", 94, u64(2),
       "last document entry at offset 94 is 2, expected the number of sequences 3"},
  };
  for (const Damage& damage : damages) {
    TempFolder folder;
    write_small(folder / "d");
    overwrite(folder / damage.file, damage.offset, damage.bytes);
    const std::string message = error_of([&] { IndexedDataset{folder / "d"}; });
    EXPECT_THAT(message, HasSubstr(damage.message));
    EXPECT_THAT(message, HasSubstr(folder / "d."));
  }
}

TEST(IndexedDataset, NamesMissingAndCutFiles) {
  TempFolder folder;
  EXPECT_THAT(error_of([&] { IndexedDataset{folder / "d"}; }),
              HasSubstr("no such file: " + folder / "d.idx"));
  write_small(folder / "d");
  EXPECT_THAT(error_of([&] { IndexedDataset{folder / "d.bin"}; }),
              HasSubstr("give the path without the extension"));
  std::filesystem::resize_file(folder / "d.bin", 9);
  for (const bool mmap : {true, false})
    EXPECT_THAT(
        error_of([&] { IndexedDataset(folder / "d", {.mmap = mmap}); }),
        HasSubstr(
            "sequence 2 ends at byte 10 but the file has 9 bytes\nhint: the file was cut short"));
  std::filesystem::resize_file(folder / "d.bin", 12);
  EXPECT_THAT(error_of([&] { IndexedDataset{folder / "d"}; }),
              HasSubstr("the two files do not belong together"));
  write_small(folder / "d");
  for (const int64_t size : {0, 33, 34, 60, 101}) {
    std::filesystem::resize_file(folder / "d.idx", size);
    EXPECT_THAT(error_of([&] { IndexedDataset{folder / "d"}; }),
                HasSubstr("hint: the file was cut short"))
        << size;
    write_small(folder / "d");
  }
}

TEST(IndexedDataset, VerifyFindsTokensOutsideTheVocabulary) {
  TempFolder folder;
  write_small(folder / "d");
  const IndexedDataset data(folder / "d");
  const VerifyResult good = verify_indexed_dataset(data, 101);
  EXPECT_EQ(good.num_bad_tokens, 0);
  EXPECT_EQ(good.min_token, 1);
  EXPECT_EQ(good.max_token, 100);
  const VerifyResult bad = verify_indexed_dataset(data, 4);
  EXPECT_EQ(bad.num_bad_tokens, 2);
  ASSERT_EQ(bad.bad_tokens.size(), 2u);
  EXPECT_EQ(
      bad.bad_tokens[0],
      folder /
          "d.bin: document 2, sequence 2, offset 0: token id 100 is outside the vocabulary of 4");
  EXPECT_EQ(good.hash, bad.hash);
  overwrite(folder / "d.bin", 0, "\7");
  EXPECT_NE(verify_indexed_dataset(IndexedDataset(folder / "d"), 0).hash, good.hash);
}

TEST(Npy, WritesAndReadsNumpyFiles) {
  TempFolder folder;
  const std::vector<int32_t> values = {1, 2, 3, 4, 5, 6};
  const std::string header = npy_header("<i4", {3, 2});
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_THAT(header, HasSubstr("{'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }"));
  EXPECT_THAT(npy_header("<u4", {7}), HasSubstr("'shape': (7,), }"));
  write_file_atomically(folder / "a.npy",
                        header + std::string(reinterpret_cast<const char*>(values.data()), 24));
  const NpyArray array(folder / "a.npy");
  EXPECT_EQ(array.shape(), (Longs{3, 2}));
  EXPECT_EQ(array.as<int32_t>("<i4")[5], 6);
  EXPECT_THAT(error_of([&] { (void)array.as<int64_t>("<i8"); }),
              HasSubstr("element type is \"<i4\", expected \"<i8\""));
  std::filesystem::resize_file(folder / "a.npy", header.size() + 20);
  EXPECT_THAT(error_of([&] { NpyArray(folder / "a.npy"); }),
              HasSubstr("20 bytes follow the header, its shape needs 6 elements of 4 bytes"));
}

TEST(Npy, RefusesDamagedHeaders) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "the header names no element type"},
      {"{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }",
       "the header names no element type"},
      {"{'descr': '<i8', 'fortran_order': True, 'shape': (1,), }", "'fortran_order': False"},
      {"{'descr': '<i8', 'fortran_order': False, }", "the header has no shape"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }", "something else than sizes"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999, 9999999999), }",
       "the header's shape is too large"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1, 1), }", "more than 2 dimensions"},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (1, ", "not closed or empty"},
  };
  TempFolder folder;
  for (const auto& [header, message] : cases) {
    std::string text(header);
    text.resize(118, ' ');
    write_file_atomically(folder / "a.npy",
                          std::string("\x93NUMPY\1\0\166\0", 10) + text + std::string(8, '\0'));
    EXPECT_THAT(error_of([&] { NpyArray(folder / "a.npy"); }), HasSubstr(message)) << header;
  }
  write_file_atomically(folder / "a.npy", "\x93NUMPY");
  EXPECT_THAT(error_of([&] { NpyArray(folder / "a.npy"); }),
              HasSubstr("the first 8 bytes are not those of a .npy file"));
}

}  // namespace
}  // namespace megatron::testing_datasets
