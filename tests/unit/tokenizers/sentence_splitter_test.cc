// Sentences against NLTK's Punkt: goldens, files of parameters, hostile texts, and (if asked for) a
// large mixed text.
#include "megatron/tokenizers/sentence_splitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/python_unicode.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Strings = std::vector<std::string>;

const std::string kPunkt = MEGATRON_SOURCE_DIR "/tests/golden/punkt/";

Strings sentences_of(const SentenceSplitter& splitter, const std::string& text) {
  std::vector<std::string_view> parts;
  splitter.split(text, parts);
  return {parts.begin(), parts.end()};
}

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "megatron-punkt-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(SentenceSplitter, EqualsNltkOnGoldens) {
  const auto texts = nlohmann::json::parse(std::ifstream(kPunkt + "text.json"));
  const auto golden = nlohmann::json::parse(std::ifstream(kPunkt + "sentences.json"));
  const PunktParameters learned = read_punkt_parameters(kPunkt + "english");
  const std::map<std::string, SentenceSplitter> splitters = {
      {"sentences", {learned, false}},
      {"keep_newlines", {learned, true}},
      {"no_parameters", {PunktParameters(), false}}};
  ASSERT_EQ(texts.size(), golden.size());
  for (size_t i = 0; i < texts.size(); ++i)
    for (const auto& [key, splitter] : splitters)
      EXPECT_EQ(sentences_of(splitter, texts[i]), golden[i][key].get<Strings>()) << i << " " << key;
}

TEST(SentenceSplitter, DividesPiecesOfAMillionCharactersByThemselves) {
  const SentenceSplitter splitter({}, false);
  // 999,999 characters of three bytes and one more: the period is in the next piece.
  std::string text;
  for (size_t i = 0; i + 1 < SentenceSplitter::kPieceCharacters; ++i) text += "\u4e2d";
  text += "a. Next one";
  EXPECT_EQ(SentenceSplitter::first_piece(text), text.size() - 10);
  const Strings sentences = sentences_of(splitter, text);
  ASSERT_EQ(sentences.size(), 3u);
  EXPECT_EQ(sentences[0].size(), text.size() - 10);
  EXPECT_EQ(sentences[1], ".");
  EXPECT_EQ(sentences[2], "Next one");
}

TEST(SentenceSplitter, IsLinearInTheLengthOfTheText) {
  for (const bool keep : {false, true}) {
    const SentenceSplitter splitter(read_punkt_parameters(kPunkt + "english"), keep);
    for (const std::string part : {".", "\"", " ", "!", ". ", ".\"", "..", ". . ", "a.", "a", "-",
                                   ".-", "\n", "!\n", "\u3000", "\u3002", ".\u00a0", ",", ".,"}) {
      std::string text = "A.";
      while (text.size() < (1 << 20)) text += part;
      std::vector<std::string_view> parts;
      const auto start = std::chrono::steady_clock::now();
      splitter.split(text, parts);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 1) << "a megabyte of \"" << part << "\"";
      EXPECT_FALSE(parts.empty());
    }
  }
}

TEST(PunktParameters, AreFoundAmongThoseOfNltk) {
  const Folder data;
  std::filesystem::create_directories(data.path() + "/tokenizers/punkt_tab");
  std::filesystem::create_directory_symlink(kPunkt + "english",
                                            data.path() + "/tokenizers/punkt_tab/german");
  ::setenv("NLTK_DATA", ("/nowhere:" + data.path()).c_str(), 1);
  EXPECT_EQ(find_punkt_parameters("german"), data.path() + "/tokenizers/punkt_tab/german");
  EXPECT_THAT(error_of([] { find_punkt_parameters("klingon"); }),
              HasSubstr("there is no tokenizers/punkt_tab/klingon in /nowhere, " + data.path()));
  EXPECT_THAT(error_of([] { find_punkt_parameters("klingon"); }),
              HasSubstr("name its folder with --punkt-params, or split without it: --punkt-params "
                        "none"));
  ::unsetenv("NLTK_DATA");
}

TEST(PunktParameters, RefuseFilesThatAreCut) {
  const Folder folder;
  const auto put = [&](const char* name, const char* text) {
    write_file_atomically(folder.path() + "/" + name, text);
  };
  const auto message = [&] { return error_of([&] { read_punkt_parameters(folder.path()); }); };
  EXPECT_THAT(message(), HasSubstr("abbrev_types.txt: there is no such file"));
  put("abbrev_types.txt", "dr\r\nmr");
  put("sent_starters.txt", "the");
  put("collocations.tab", "s\tbach");
  put("ortho_context.tab", "the\t46\nsoon\t6");
  const PunktParameters read = read_punkt_parameters(folder.path());
  EXPECT_EQ(read.facts("mr"), PunktParameters::kAbbreviation);
  EXPECT_EQ(read.facts("the"), PunktParameters::kStarter | 46);
  EXPECT_TRUE(read.is_collocation("s", "bach"));
  EXPECT_FALSE(read.is_collocation("bach", "s"));
  EXPECT_EQ(read.facts("absent"), 0);
  put("ortho_context.tab", "the\t46\nsoo");
  EXPECT_THAT(message(), HasSubstr("ortho_context.tab: line 2 is \"soo\", expected two entries "
                                   "with a tab between them"));
  put("ortho_context.tab", "the\t46\nsoon\t");
  EXPECT_THAT(message(),
              HasSubstr("line 2: the flags are \"\", expected a sum of 2, 4, 8, 16, 32"));
  put("ortho_context.tab", "the\t128");
  EXPECT_THAT(message(), HasSubstr("line 1: the flags are \"128\""));
  put("sent_starters.txt", "th\xff");
  EXPECT_THAT(message(), HasSubstr("sent_starters.txt: byte 2 is not UTF-8"));
}

TEST(PythonText, LowerCaseKnowsFinalSigmas) {
  const auto lower = [](std::string_view text) {
    std::string out;
    append_python_lower(text, out);
    return out;
  };
  EXPECT_EQ(lower("\u03a3\u0391\u03a3"), "\u03c3\u03b1\u03c2");
  EXPECT_EQ(lower("\u0391\u03a3'."), "\u03b1\u03c2'.");
  EXPECT_EQ(lower("\u0391\u03a3'\u0391"), "\u03b1\u03c3'\u03b1");
  EXPECT_EQ(lower("\u03a3"), "\u03c3");
  EXPECT_EQ(lower("\u0130X"), "i\u0307x");
}

// 10 MB that tests/golden/punkt/mixed_text.py makes and NLTK divides; processor time is compared.
// MEGATRON_NLTK_PYTHON: a Python with nltk 3.9.1.
TEST(SentenceSplitter, EqualsNltkOnTenMegabytesInAFiftiethOfTheTime) {
  const char* python = std::getenv("MEGATRON_NLTK_PYTHON");
  if (python == nullptr) GTEST_SKIP() << "MEGATRON_NLTK_PYTHON is not set";
  const Folder folder;
  FILE* peer =
      ::popen(cat(python, " ", kPunkt, "mixed_text.py ", folder.path(), " 10 7").c_str(), "r");
  std::map<std::string, double> rates;
  char name[40];
  for (double rate = 0; std::fscanf(peer, "%39s %lf", name, &rate) == 2;) rates[name] = rate;
  ASSERT_EQ(::pclose(peer), 0);
  const std::string text = read_file(folder.path() + "/text.txt");
  const PunktParameters learned = read_punkt_parameters(folder.path() + "/english");
  for (const bool with : {true, false}) {
    for (const bool keep : {false, true}) {
      const std::string key = cat(with ? "learned" : "none", keep ? "_keep" : "_plain");
      const SentenceSplitter splitter(with ? learned : PunktParameters(), keep);
      std::vector<std::string_view> sentences;
      const std::clock_t start = std::clock();
      splitter.split(text, sentences);
      const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
      std::string listed;
      for (const std::string_view sentence : sentences) {
        listed += std::to_string(sentence.size()) + " ";
        listed += sentence;
      }
      EXPECT_TRUE(listed == read_file(folder.path() + "/" + key)) << key;
      const double ratio = static_cast<double>(text.size()) / seconds / rates.at(key);
      std::printf("%s: %zu sentences, %.0f times as fast as NLTK\n", key.c_str(), sentences.size(),
                  ratio);
      EXPECT_GE(ratio, 50) << key;
    }
  }
}

}  // namespace
}  // namespace megatron
