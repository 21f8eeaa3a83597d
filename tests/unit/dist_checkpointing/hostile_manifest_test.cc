// Manifests with valid checksum and invalid contents: refused, with the manifest and the fault
// named, in bounded time and memory. Tested with every reader: parsing, verification, resuming.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "test_support.h"
#include "tests/unit/slowness.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using testing::HasSubstr;

// Resident memory of this process at its highest, in MB.
int64_t peak_memory() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

std::string with_checksum(const std::string& body) {
  const XXH128_hash_t hash = XXH3_128bits(body.data(), body.size());
  char trailer[96];
  std::snprintf(trailer, sizeof trailer, "\"manifest_xxh3_128\": \"%016llx%016llx\"\n}\n",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return body + trailer;
}

constexpr std::chrono::seconds kBound{60 * kSlowness};

class HostileManifest : public testing::Test {
 protected:
  void SetUp() override {
    TinyModel good(1), bad(2);
    save_checkpoint(request_for(good, folder_.path(), 1));
    directory_ = save_checkpoint(request_for(bad, folder_.path(), 2)).directory;
    text_ = slurp(directory_ / kManifestName);
    root_ = ordered_json::parse(text_);
    root_.erase("manifest_xxh3_128");
  }

  // `body`: the manifest but for its last member.
  void expect_body_refused(const std::string& body, const std::string& why) {
    spill(directory_ / kManifestName, with_checksum(body));
    const int64_t before = peak_memory();
    const auto begin = std::chrono::steady_clock::now();
    const StartDecision decision =
        resolve_start({StartMode::kResume, folder_.path(), {}, {}, false});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kBound) << why;
    EXPECT_LT(peak_memory() - before, 1000) << why;
    EXPECT_EQ(decision.checkpoint->iteration, 1) << why;
    ASSERT_EQ(decision.warnings.size(), 1u) << why;
    EXPECT_THAT(decision.warnings[0], HasSubstr("iter_0000002"));
    EXPECT_THAT(decision.warnings[0], HasSubstr(why));
    EXPECT_LT(decision.warnings[0].size(), 2000u);
  }

  void expect_refused(const std::function<void(ordered_json&)>& change, const std::string& why) {
    ordered_json root = root_;
    change(root);
    std::string body = root.dump();
    body.back() = ',';
    expect_body_refused(body + "\n", why);
  }

  ordered_json& fragment(ordered_json& root) {
    return root["tensors"]["model.weight"]["fragments"][0];
  }

  ScratchFolder folder_;
  fs::path directory_;
  std::string text_;
  ordered_json root_;
};

TEST_F(HostileManifest, TheTestsOwnChecksumIsRight) {
  spill(directory_ / kManifestName,
        with_checksum(text_.substr(0, text_.find("\"manifest_xxh3_128\""))));
  EXPECT_EQ(
      resolve_start({StartMode::kResume, folder_.path(), {}, {}, false}).checkpoint->iteration, 2);
}

TEST_F(HostileManifest, Numbers) {
  for (const ordered_json& value :
       {ordered_json(-1), ordered_json(1e300), ordered_json(0.5), ordered_json(UINT64_MAX),
        ordered_json(INT64_MAX), ordered_json("4"), ordered_json(nullptr),
        ordered_json(ordered_json::array())}) {
    SCOPED_TRACE(value.dump());
    expect_refused([&](ordered_json& root) { root["files"][0]["bytes"] = value; }, "");
    expect_refused([&](ordered_json& root) { root["files"][0]["header_bytes"] = value; }, "");
    expect_refused([&](ordered_json& root) { root["tensors"]["model.weight"]["shape"][0] = value; },
                   "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["offset"] = value; }, "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["file"] = value; }, "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["box"][0][0] = value; },
                   "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["box"][1][1] = value; },
                   "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["flat"] = {0, value}; },
                   "model.weight");
    expect_refused([&](ordered_json& root) { fragment(root)["flat"] = {value, 2560}; },
                   "model.weight");
    expect_refused([&](ordered_json& root) { root["iteration"] = value; }, "iteration");
    expect_refused([&](ordered_json& root) { root["block_bytes"] = value; }, "");
    expect_refused([&](ordered_json& root) { root["format_version"] = value; }, "");
  }
  expect_refused(
      [&](ordered_json& root) {
        root["tensors"]["model.weight"]["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
      },
      "too large");
  expect_refused(
      [&](ordered_json& root) {
        root["tensors"]["model.weight"]["shape"] = std::vector<int>(5000, 1);
      },
      "at most 64");
  expect_refused([&](ordered_json& root) { root["iteration"] = 3; },
                 "its manifest is of iteration 3");
}

TEST_F(HostileManifest, Overlaps) {
  expect_refused(
      [&](ordered_json& root) {
        root["tensors"]["model.weight"]["fragments"].push_back(fragment(root));
      },
      "model.weight");
  expect_refused(
      [&](ordered_json& root) {
        ordered_json& parts = root["tensors"]["model.weight"]["fragments"];
        parts = {fragment(root), fragment(root)};
        parts[0]["flat"] = {0, 1280};
        parts[1]["flat"] = {1279, 2559};
      },
      "given twice");
  expect_refused(
      [&](ordered_json& root) {
        root["tensors"]["model.weight"]["fragments"] = ordered_json::array();
      },
      "hold 0 of its 2560");
}

TEST_F(HostileManifest, ManyPartsTakeBoundedTime) {
  // Columns of one row: each lies beside every other in the first dimension.
  expect_refused(
      [&](ordered_json& root) {
        constexpr int kColumns = 60000;
        ordered_json parts = ordered_json::array();
        for (int i = 0; i < kColumns; ++i)
          parts.push_back({{"file", 0}, {"offset", 0}, {"box", {{0, i}, {1, 1}}}});
        parts.back()["box"][0][1] = 0;
        root["tensors"]["model.weight"] = {
            {"dtype", "U8"}, {"shape", {1, kColumns}}, {"fragments", parts}};
      },
      "model.weight");
  // Two boxes that overlap in half a billion rows without sharing an element.
  expect_refused(
      [&](ordered_json& root) {
        const int64_t rows = int64_t{1} << 29;
        root["files"][0]["bytes"] = 4 * rows + root["files"][0]["header_bytes"].get<int64_t>();
        root["files"][0]["block_xxh3"] =
            std::string(static_cast<size_t>(4 * rows / (1 << 20)) * 16, '0');
        root["tensors"] = {
            {"w",
             {{"dtype", "U8"},
              {"shape", {rows, 2}},
              {"fragments",
               {{{"file", 0}, {"offset", 0}, {"box", {{0, 0}, {rows, 2}}}, {"flat", {0, rows}}},
                {{"file", 0},
                 {"offset", 0},
                 {"box", {{0, 1}, {rows, 1}}},
                 {"flat", {rows / 2, rows}}},
                {{"file", 0},
                 {"offset", 0},
                 {"box", {{0, 0}, {rows, 1}}},
                 {"flat", {rows / 2, rows}}}}}}}};
      },
      "tensor w");
}

TEST_F(HostileManifest, NamesThatLeaveTheFolder) {
  for (const char* name : {"../iter_0000001/rank_00000.safetensors", "/etc/passwd", "a/../../b", "",
                           ".", "..", "a//b", "./a", "a\\b", "a/"})
    expect_refused([&](ordered_json& root) { root["files"][0]["name"] = name; },
                   "is no name of a file inside the checkpoint");
  expect_refused([&](ordered_json& root) { root["files"][1]["name"] = root["files"][0]["name"]; },
                 "listed twice");
  expect_refused([&](ordered_json& root) { root["files"][0]["name"] = std::string(100000, 'x'); },
                 "a name of 100000 bytes");
  expect_refused(
      [&](ordered_json& root) {
        root["tensors"][std::string(100000, 'x')] = root["tensors"]["model.bias"];
      },
      "a name of 100000 bytes");
}

TEST_F(HostileManifest, NamesGivenTwice) {
  const std::string body = text_.substr(0, text_.find("\"manifest_xxh3_128\""));
  for (const char* name : {"iteration", "files", "tensors", "format"}) {
    const size_t at = body.find(cat("\"", name, "\""));
    expect_body_refused(cat(body.substr(0, at), "\"", name, "\": {}, ", body.substr(at)),
                        cat("gives \"", name, "\" twice"));
  }
  const size_t bias = body.find("\"model.bias\"");
  const std::string tensor = body.substr(bias, body.find('\n', bias) - bias);
  expect_body_refused(body.substr(0, bias) + tensor + "\n" + body.substr(bias),
                      "gives \"model.bias\" twice");
}

TEST_F(HostileManifest, DeepNestingAndEndlessLists) {
  const std::string body = text_.substr(0, text_.find("\"manifest_xxh3_128\""));
  const auto with_state = [&](const std::string& state) {
    const size_t begin = body.find("\"state\": ") + 9, end = body.find(",\n\"files\"");
    return body.substr(0, begin) + state + body.substr(end);
  };
  constexpr size_t kDepth = 1000000;
  expect_body_refused(
      with_state("{\"a\":" + std::string(kDepth, '[') + std::string(kDepth, ']') + "}"),
      "nested more than 64 deep");
  std::string objects;
  for (size_t i = 0; i < 100000; ++i) objects += "{\"a\":";
  expect_body_refused(with_state(objects + "1" + std::string(100000, '}')),
                      "nested more than 64 deep");
  expect_refused([&](ordered_json& root) { root["state"] = ordered_json::array(); },
                 "state is not an object");
  expect_refused([&](ordered_json& root) { root["files"] = ordered_json::object(); },
                 "files are no list");
  expect_refused([&](ordered_json& root) { root["tensors"] = ordered_json::array(); },
                 "tensors no object");
  expect_refused([&](ordered_json& root) { root.erase("files"); }, "files");
  expect_refused([&](ordered_json& root) { root["tensors"]["model.weight"]["dtype"] = "F3"; },
                 "model.weight");
  expect_body_refused("{", "");
  expect_body_refused("[1,", "");
  expect_body_refused(std::string(50000000, '['), "nested more than 64 deep");
}

}  // namespace
}  // namespace megatron
