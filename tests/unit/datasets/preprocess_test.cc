// Preprocessing of text to tokens on disk: formats, compression, order, and an error with its
// location for each kind of bad input.
#include "megatron/datasets/sources/preprocess.h"

#include <zlib.h>
#include <zstd.h>

#include <random>

#include "megatron/base/files.h"
#include "megatron/datasets/indexed_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

std::unique_ptr<Tokenizer> tokenizer_of(const std::string& type,
                                        std::optional<int64_t> vocab_size = {}) {
  TokenizerConfig config;
  config.tokenizer_type = type;
  config.vocab_size = vocab_size;
  return make_tokenizer(config);
}

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(compressBound(text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = text.size();
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = out.size();
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string zstd(const std::string& text) {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // as the zstd program does
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress2(context, out.data(), out.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return out;
}

class PreprocessTest : public ::testing::Test {
 protected:
  PreprocessTest() {
    options.output_prefix = folder / "out";
    options.overwrite = true;  // tests write more than once
    options.workers = 3;
  }
  std::string put(const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder / name).parent_path());
    write_file_atomically(folder / name, text);
    return folder / name;
  }
  PreprocessResult run(const std::vector<std::string>& inputs) {
    options.inputs = inputs;
    return preprocess_files(options, *bytes);
  }
  // The documents of one key as text; each byte is a token, <|endoftext|> (256) is shown as $ and
  // sequences end in |.
  std::vector<std::string> documents(const std::string& key = "text") {
    const IndexedDataset data(options.output_prefix + "_" + key +
                              (options.splitter ? "_sentence" : "_document"));
    std::vector<std::string> out;
    for (int64_t d = 0; d < data.num_documents(); ++d) {
      out.emplace_back();
      for (int64_t s = data.document_indices()[d]; s < data.document_indices()[d + 1]; ++s) {
        for (const int64_t token : data.read(s))
          out.back() += token == 256 ? '$' : static_cast<char>(token);
        out.back() += '|';
      }
    }
    return out;
  }
  // The error of a run, which must leave no output behind.
  std::string error_of_run(const std::vector<std::string>& inputs) {
    const std::string message = error_of([&] { run(inputs); });
    for (const std::string& name : folder.files())
      EXPECT_THAT(name, ::testing::Not(::testing::StartsWith("out")));
    return message;
  }

  TempFolder folder;
  PreprocessOptions options;
  std::unique_ptr<Tokenizer> bytes = tokenizer_of("ByteLevelTokenizer");
};

using Strings = std::vector<std::string>;

TEST_F(PreprocessTest, ReadsJsonLines) {
  put("a.jsonl",
      "{\"text\": \"one\", \"n\": 1}\n\n{\"text\": \"\"}\r\n{\"text\": \"tw\\u00f6\", \"text\": "
      "\"last\"}\n"
      "{\"n\": 123456789012345678901234567890, \"text\": [\"a\", \"\", \"b\"]}");
  const PreprocessResult result = run({folder / "a.jsonl"});
  EXPECT_EQ(documents(), (Strings{"one|", "", "last|", "a|b|"}));
  EXPECT_EQ(result.datasets[0].num_documents, 4);
  EXPECT_EQ(result.datasets[0].num_tokens, 9);
  EXPECT_EQ(result.datasets[0].prefix, folder / "out_text_document");
  options.append_eod = true;
  run({folder / "a.jsonl"});
  EXPECT_EQ(documents(), (Strings{"one$|", "", "last$|", "a|b$|"}));
  EXPECT_EQ(folder.files(), (Strings{"a.jsonl", "out_text_document.bin", "out_text_document.idx",
                                     "out_text_document.json"}));
}

TEST_F(PreprocessTest, WritesOneDatasetForEachKey) {
  options.json_keys = {"q", "a"};
  put("a.json", "{\"a\": \"A\", \"q\": \"Q\"}\n{\"q\": [\"x\", \"y\"], \"a\": \"\"}\n");
  run({folder / "a.json"});
  EXPECT_EQ(documents("q"), (Strings{"Q|", "x|y|"}));
  EXPECT_EQ(documents("a"), (Strings{"A|", ""}));
}

TEST_F(PreprocessTest, SplitsSentences) {
  options.splitter = std::make_shared<const SentenceSplitter>(PunktParameters(), false);
  put("a.jsonl",
      "{\"text\": \"One here. Two! \\n\\n Three\"}\n{\"text\": \"\"}\n"
      "{\"text\": [\"As. It. Is.\", \"\", \"Yes.\"]}");
  const PreprocessResult result = run({folder / "a.jsonl"});
  EXPECT_EQ(documents(), (Strings{"One here.|Two!|Three|", "", "As. It. Is.|Yes.|"}));
  EXPECT_EQ(result.datasets[0].prefix, folder / "out_text_sentence");
  EXPECT_EQ(result.datasets[0].num_sequences, 5);
  options.append_eod = true;
  options.splitter = std::make_shared<const SentenceSplitter>(PunktParameters(), true);
  run({folder / "a.jsonl"});
  EXPECT_EQ(documents(), (Strings{"One here. |Two! \n\n |Three$|", "", "As. It. Is.|Yes.$|"}));
}

TEST_F(PreprocessTest, SplitsSentencesOfLongTexts) {
  options.splitter = std::make_shared<const SentenceSplitter>(PunktParameters(), false);
  options.append_eod = true;
  std::string text;
  for (int i = 0; text.size() < 2'300'000; ++i) text += cat("This is sentence ", i, ". ");
  put("a/b.txt", "Short one. Here.");
  put("a/a.txt", text);
  put("a/c.txt", " ");
  run({folder / "a"});
  std::vector<std::string_view> sentences;
  options.splitter->split(text, sentences);
  std::string expected;
  for (const std::string_view sentence : sentences) expected += std::string(sentence) + "|";
  expected.insert(expected.size() - 1, "$");
  EXPECT_EQ(documents(), (Strings{expected, "Short one.|Here.$|", ""}));
}

TEST_F(PreprocessTest, ReadsTextFilesAndFoldersInOrder) {
  put("t/b.txt", "second");
  put("t/a.md",
      "\xef\xbb\xbf"
      "first");
  put("t/sub/c.cc", "third\n");
  put("t/.hidden", "no");
  put("t/.git/x", "no");
  put("t/d.txt", "");
  put("t/e.json", "{}");
  options.append_eod = true;
  run({folder / "t"});
  EXPECT_EQ(documents(), (Strings{"first$|", "second$|", "", "{}$|", "third\n$|"}));
}

TEST_F(PreprocessTest, ChoosesFormatsByExtensionAndRefusesMixtures) {
  put("j/a.json", "{\"text\": \"x\"}");
  put("j/b.jsonl.gz", gzip("{\"text\": \"y\"}"));
  run({folder / "j"});
  EXPECT_EQ(documents(), (Strings{"x|", "y|"}));
  std::filesystem::remove(options.output_prefix + "_text_document.idx");
  std::filesystem::remove(options.output_prefix + "_text_document.bin");
  std::filesystem::remove(options.output_prefix + "_text_document.json");
  put("j/c.txt", "text");
  EXPECT_THAT(error_of_run({folder / "j"}), HasSubstr("holds files of different kinds"));
  options.format = InputFormat::kText;
  run({folder / "j/a.json", folder / "j/c.txt"});
  EXPECT_EQ(documents(), (Strings{"{\"text\": \"x\"}|", "text|"}));
}

// Lines of random lengths, more than fit one chunk.
std::string many_lines(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out;
  for (int i = 0; i < count; ++i) {
    out += "{\"text\": \"" + std::to_string(i) + " " +
           std::string(random() % 3000, static_cast<char>('a' + i % 26)) + "\"}\n";
  }
  return out;
}

TEST_F(PreprocessTest, CompressionAndWorkersDoNotChangeTheResult) {
  const std::string text = many_lines(1500, 1);
  put("a.jsonl", text);
  // Several members and frames follow each other in one file.
  put("g.jsonl.gz", gzip(text.substr(0, 1000)) + gzip(text.substr(1000)));
  put("z.jsonl.zst", zstd(text.substr(0, 1000)) + zstd(text.substr(1000)));
  run({folder / "a.jsonl"});
  const std::string bin = read_file(folder / "out_text_document.bin"),
                    idx = read_file(folder / "out_text_document.idx");
  EXPECT_EQ(IndexedDataset(folder / "out_text_document").num_documents(), 1500);
  for (const int workers : {1, 2, 7}) {
    options.workers = workers;
    for (const char* name : {"a.jsonl", "g.jsonl.gz", "z.jsonl.zst"}) {
      run({folder / name});
      EXPECT_EQ(read_file(folder / "out_text_document.bin"), bin) << name;
      EXPECT_EQ(read_file(folder / "out_text_document.idx"), idx) << name;
    }
  }
}

TEST_F(PreprocessTest, LongTextIsCutWithoutAnyEffect) {
  std::mt19937 random(3);
  std::string text;
  while (text.size() < 200000) {
    text += "word" + std::to_string(random() % 1000);
    text += std::vector<std::string>{
        " ", "\n", ", ", "\r\n\r\n", "  ", " \xc3\xa9t\xc3\xa9 "}[random() % 6];
  }
  put("t.txt", text);
  options.append_eod = true;
  options.text_piece_bytes = 5000;
  run({folder / "t.txt"});
  EXPECT_EQ(documents(), (Strings{text + "$|"}));
  put("u.txt", std::string(30000, 'x'));
  options.max_line_bytes = 20000;
  std::filesystem::remove(folder / "out_text_document.idx");
  std::filesystem::remove(folder / "out_text_document.bin");
  std::filesystem::remove(folder / "out_text_document.json");
  EXPECT_THAT(error_of_run({folder / "u.txt"}),
              HasSubstr("u.txt: the text from byte offset 0 on has no space between two letters "
                        "within 20000 bytes"));
}

TEST_F(PreprocessTest, NamesFileAndLineOfBadJson) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"text\": \"a\"", "a.jsonl: line 3: is no JSON: "},
      {"[1]", "a.jsonl: line 3: is a list, expected an object"},
      {"{\"body\": 1}", "a.jsonl: line 3: has no key \"text\""},
      {"{\"text\": 5}",
       "a.jsonl: line 3: \"text\" is a number, expected a string or a list of strings"},
      {"{\"text\": null}", "a.jsonl: line 3: \"text\" is null"},
      {"{\"text\": [\"a\", {}]}",
       "a.jsonl: line 3: an element of \"text\" is an object, expected a string"},
      {"{\"text\": \"a\xff\"}", "a.jsonl: line 3: the byte at offset 11 of the line is not UTF-8"},
      {"{\"text\": \"\\ud800\"}", "a.jsonl: line 3: is no JSON: "},
      {"{\"text\": \"a\"} x", "a.jsonl: line 3: is no JSON: "},
  };
  for (const auto& [line, message] : cases) {
    put("a.jsonl", std::string("{\"text\": \"ok\"}\n\n") + line + "\n{\"text\": 3}\n");
    EXPECT_THAT(error_of_run({folder / "a.jsonl"}), HasSubstr(message)) << line;
  }
  put("b.jsonl", many_lines(3000, 2) + "{\"text\": 1}\n" + many_lines(10, 3));
  EXPECT_THAT(error_of_run({folder / "b.jsonl"}),
              HasSubstr("b.jsonl: line 3001: \"text\" is a number"));
  options.max_line_bytes = 1 << 18;
  put("c.jsonl", "{\"text\": \"" + std::string(600000, 'x') + "\"}\n");
  EXPECT_THAT(error_of_run({folder / "c.jsonl"}),
              HasSubstr("c.jsonl: line 1 is longer than 262144 bytes"));
}

TEST_F(PreprocessTest, NamesTheOffsetOfTextThatIsNotUtf8) {
  put("t.txt", "good \xc3\xa9 then \xc3(");
  EXPECT_THAT(error_of_run({folder / "t.txt"}),
              HasSubstr("t.txt: the byte at offset 13 is not UTF-8"));
}

TEST_F(PreprocessTest, NamesTruncatedAndDamagedArchives) {
  const std::string text = many_lines(400, 4);
  for (const auto& [name, whole] :
       {std::pair{"a.jsonl.gz", gzip(text)}, {"a.jsonl.zst", zstd(text)}}) {
    for (const size_t size : {whole.size() - 1, whole.size() / 2, size_t{12}}) {
      put(name, whole.substr(0, size));
      const std::string message = error_of_run({folder / name});
      EXPECT_THAT(message, HasSubstr(std::string(name) + ": the ")) << size;
      EXPECT_THAT(message, HasSubstr("before its end mark\nhint: the archive was cut short"));
    }
    std::string damaged = whole;
    damaged[damaged.size() / 2] ^= 0x10;
    damaged[damaged.size() / 2 + 1] ^= 0x55;
    put(name, damaged);
    EXPECT_NE(error_of_run({folder / name}), "");
    put(name, "plain");
    EXPECT_THAT(error_of_run({folder / name}), HasSubstr(": does not start like a ."));
  }
}

TEST_F(PreprocessTest, RefusesWhatCannotWork) {
  EXPECT_THAT(error_of_run({folder / "none"}), HasSubstr("none: no such file or folder"));
  std::filesystem::create_directory(folder / "empty");
  EXPECT_THAT(error_of_run({folder / "empty"}), HasSubstr("empty: the folder holds no files"));
  put("t.txt", "x");
  options.json_keys = {"a", "b"};
  EXPECT_THAT(error_of_run({folder / "t.txt"}), HasSubstr("text files have only one text"));
  options.json_keys = {"a", "a"};
  EXPECT_THAT(error_of_run({folder / "t.txt"}), HasSubstr("--json-keys names a key twice"));
}

TEST_F(PreprocessTest, ElementTypeFollowsTheVocabulary) {
  put("n.txt", "70000 1 2");
  options.inputs = {folder / "n.txt"};
  const auto large = tokenizer_of("NullTokenizer", 70001);
  preprocess_files(options, *large);
  const IndexedDataset data(folder / "out_text_document");
  EXPECT_EQ(data.type(), IndexedType::kInt32);
  EXPECT_EQ(data.read(0), (Longs{70000, 1, 2}));
}

TEST_F(PreprocessTest, ReadsParquetWhereItIsBuilt) {
  const std::string file = MEGATRON_SOURCE_DIR "/tests/golden/datasets/rows.parquet";
  const std::string message = error_of([&] { run({file}); });
  if (message.find("which was not built or cannot be loaded") != std::string::npos) {
    EXPECT_THAT(message, HasSubstr("install the pyarrow wheel"));
    GTEST_SKIP() << message;
  }
  ASSERT_EQ(message, "");
  const Strings rows = documents();
  ASSERT_EQ(rows.size(), 1000u);
  EXPECT_EQ(rows[0], "");
  EXPECT_EQ(rows[1], "row 1 x|");
  EXPECT_EQ(rows[999], "row 999 " + std::string(999 % 50, 'x') + "|");
  std::filesystem::remove(folder / "out_text_document.idx");
  std::filesystem::remove(folder / "out_text_document.bin");
  std::filesystem::remove(folder / "out_text_document.json");
  options.json_keys = {"number"};
  EXPECT_THAT(error_of_run({file}), HasSubstr("column \"number\" is int64, expected string"));
  options.json_keys = {"absent"};
  EXPECT_THAT(error_of_run({file}),
              HasSubstr("has no column \"absent\"; its columns are number, text, maybe"));
  options.json_keys = {"maybe"};
  EXPECT_THAT(error_of_run({file}), HasSubstr("column \"maybe\" is null, expected a string"));
  put("cut.parquet", read_file(file).substr(0, 500));
  options.json_keys = {"text"};
  EXPECT_THAT(error_of_run({folder / "cut.parquet"}), HasSubstr("cut.parquet: "));
}

}  // namespace
}  // namespace megatron::testing_datasets
