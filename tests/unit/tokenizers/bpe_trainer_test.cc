#include "megatron/tokenizers/bpe_trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <sstream>

#include "testing.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

BpeTrainerOptions options_of(int64_t vocab_size, std::string pattern = "gpt2") {
  BpeTrainerOptions options;
  options.vocab_size = vocab_size;
  options.pattern = std::move(pattern);
  return options;
}

TrainingInput input_of(std::vector<std::filesystem::path> paths, int threads = 2) {
  TrainingInput input;
  input.paths = std::move(paths);
  input.threads = threads;
  return input;
}

// The lines of the "merges" array, one merge each.
std::string merges_of(const std::filesystem::path& tokenizer) {
  std::istringstream in(read_file(tokenizer));
  std::string merges;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (inside && line.find('"') == line.npos) break;
    if (inside) {
      std::string merge = line.substr(line.find('"') + 1, line.rfind('"') - line.find('"') - 1);
      for (size_t at = 0; (at = merge.find('\\', at)) != merge.npos; ++at) merge.erase(at, 1);
      merges += merge + "\n";
    }
    inside = inside || line.find("\"merges\": [") != line.npos;
  }
  return merges;
}

TEST(WordCounter, CountsWordsAndForgetsTheRarest) {
  BpeTrainerOptions options = options_of(300);
  options.max_words = 2;
  WordCounter counter(options);
  counter.count({"a a a bb bb c", " a"});
  EXPECT_EQ(counter.num_words(), 4);  // "a", " a", " bb", " c"
  counter.prune();
  EXPECT_EQ(counter.num_words(), 2);
  EXPECT_EQ(counter.num_forgotten(), 2);
  EXPECT_THAT(counter.take(), ElementsAre(Pair(" a", 3), Pair(" bb", 2)));
}

TEST(LearnBpe, MergesTheMostFrequentPairThenTheSmallestIds) {
  BpeTrainerOptions options = options_of(1000);
  options.special_tokens.clear();
  const LearnedBpe bpe = learn_bpe({{"aaaa", 5}, {"abab", 5}, {"xy", 1}}, options);
  std::vector<std::string> learned(bpe.tokens.begin() + 256, bpe.tokens.end());
  // aa occurs 15 times; then ab 10; the rest once per word: aaaa and abab 5 each. xy is below the
  // minimum of 2.
  EXPECT_THAT(learned, ElementsAre("aa", "ab", "aaaa", "abab"));
}

TEST(TrainBpe, EqualsThePackageWhateverTheThreads) {
  const TemporaryFolder folder;
  const std::string expected = read_file(golden_dir() / "learn.merges");
  std::string first;
  for (const int threads : {1, 3}) {
    const auto report = train_bpe(input_of({golden_dir() / "learn.jsonl"}, threads),
                                  options_of(601, "llama3"), folder / "t.json");
    EXPECT_EQ(report.num_tokens, 601);
    EXPECT_EQ(merges_of(folder / "t.json"), expected);
    if (threads == 1) first = read_file(folder / "t.json");
    EXPECT_EQ(read_file(folder / "t.json"), first);
  }
  const auto tokenizer = load(folder / "t.json");
  EXPECT_EQ(tokenizer->eod(), 600);
  EXPECT_EQ(tokenizer->vocab_size(), 601);
}

TEST(TrainBpe, EveryPatternWritesALoadableFile) {
  const TemporaryFolder folder;
  for (const char* pattern : {"gpt2", "llama3", "qwen2"}) {
    BpeTrainerOptions options = options_of(400, pattern);
    options.special_tokens = {"<a>", "say \"hi\"\\\n"};
    train_bpe(input_of({golden_dir() / "learn.jsonl"}), options, folder / "t.json");
    const auto tokenizer = load(folder / "t.json");
    const std::string text = "It's 12345 say \"hi\"\\\n<a>";
    const std::vector<int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(ids.at(ids.size() - 2), 399);
    EXPECT_EQ(ids.back(), 398);
    EXPECT_EQ(tokenizer->decode(ids), text);
  }
}

TEST(TrainBpe, ReadsFoldersAndCompressedFiles) {
  const TemporaryFolder folder;
  const std::string text = read_file(golden_dir() / "hard_text.py");
  std::filesystem::create_directories(folder / "sub/.hidden");
  const auto plain = folder.write("sub/plain.txt", text);
  folder.write("sub/.hidden/other.txt", "zzzz zzzz zzzz");
  folder.write("sub/binary.bin", std::string("zz\0zz zz", 8));
  train_bpe(input_of({plain}), options_of(400), folder / "plain.json");
  const auto report =
      train_bpe(input_of({folder / "sub"}), options_of(400), folder / "folder.json");
  EXPECT_EQ(report.num_files, 1);
  EXPECT_EQ(read_file(folder / "folder.json"), read_file(folder / "plain.json"));

  gzFile gz = gzopen((folder / "t.txt.gz").c_str(), "wb");
  ASSERT_EQ(gzwrite(gz, text.data(), static_cast<unsigned>(text.size())),
            static_cast<int>(text.size()));
  gzclose(gz);
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  folder.write("t.txt.zst", packed);
  for (const char* name : {"t.txt.gz", "t.txt.zst"}) {
    train_bpe(input_of({folder / name}), options_of(400), folder / "packed.json");
    EXPECT_EQ(read_file(folder / "packed.json"), read_file(folder / "plain.json")) << name;
    const std::string whole = read_file(folder / name);
    folder.write(name, whole.substr(0, whole.size() / 2));
    EXPECT_THAT(error_of([&] {
                  train_bpe(input_of({folder / name}), options_of(400), folder / "packed.json");
                }),
                HasSubstr(std::string(name) + ": the "))
        << name;
  }
}

// Text longer than a block: nothing is lost or counted twice where blocks meet.
TEST(TrainBpe, BlocksCoverTheText) {
  const TemporaryFolder folder;
  std::string text, lines;
  for (int i = 0; text.size() < 5'000'000; ++i) {
    text += i % 1000 == 0 ? "\n\xe4\xbd\xa0\n\n" : "word";
    lines += "{\"text\": \"word\"}\n";
  }
  const auto words = [&](std::string_view name) {
    BpeTrainerOptions options = options_of(260);
    options.min_frequency = 1;
    return train_bpe(input_of({folder / name}), options, folder / "t.json");
  };
  folder.write("t.txt", text);
  EXPECT_EQ(words("t.txt").num_bytes, static_cast<int64_t>(text.size()));
  folder.write("one.txt", std::string(3'000'000, 'x'));
  EXPECT_EQ(words("one.txt").num_bytes, 3'000'000);
  folder.write("t.jsonl", lines);
  const TrainingReport report = words("t.jsonl");
  EXPECT_EQ(report.num_documents,
            static_cast<int64_t>(std::count(lines.begin(), lines.end(), '\n')));
  EXPECT_EQ(report.num_words, 1);
  folder.write("big.jsonl", "{\"n\": 123456789012345678901234567890, \"text\": \"x\"}\n");
  EXPECT_EQ(words("big.jsonl").num_documents, 1);
}

TEST(TrainBpe, WrongInputIsNamed) {
  const TemporaryFolder folder;
  const auto message = [&](const std::filesystem::path& path) {
    return error_of([&] { train_bpe(input_of({path}), options_of(400), folder / "t.json"); });
  };
  EXPECT_THAT(message(folder / "none"), HasSubstr("none: no such file or folder"));
  EXPECT_THAT(message(folder.write("a.jsonl", "{\"text\": \"x\"}\n\n{\"text\": ")),
              HasSubstr("a.jsonl: line 3: is no JSON"));
  EXPECT_THAT(message(folder.write("a.jsonl", "[]\n")), HasSubstr("line 1 is not a JSON object"));
  EXPECT_THAT(message(folder.write("a.jsonl", "{\"x\": 1}\n")),
              HasSubstr("line 1 has no \"text\""));
  EXPECT_THAT(message(folder.write("a.jsonl", "{\"text\": 1}\n")),
              HasSubstr("line 1: \"text\" is not a string"));
  EXPECT_THAT(message(folder.write("a.txt", "")), HasSubstr("no text to learn from"));
  EXPECT_THAT(message(folder.write("a.txt.gz", "plain")), HasSubstr("not a gzip file"));
  EXPECT_THAT(message(folder.write("a.txt.zst", "plain")), HasSubstr("zstd data"));
  std::filesystem::create_directory(folder / "empty");
  EXPECT_THAT(message(folder / "empty"), HasSubstr("holds no text files"));
  EXPECT_FALSE(std::filesystem::exists(folder / "t.json"));
  const auto good = folder.write("b.txt", "some words");
  EXPECT_THAT(error_of([&] { train_bpe(input_of({good}), options_of(200), folder / "t.json"); }),
              HasSubstr("--vocab-size 200 is too small"));
  EXPECT_THAT(
      error_of([&] { train_bpe(input_of({good}), options_of(400, "x"), folder / "t.json"); }),
      HasSubstr("--pattern is \"x\""));
  BpeTrainerOptions options = options_of(400);
  options.special_tokens = {"a"};
  EXPECT_THAT(error_of([&] { train_bpe(input_of({good}), options, folder / "t.json"); }),
              HasSubstr("special token \"a\" is given twice or is an ordinary token"));
}

}  // namespace
}  // namespace megatron
