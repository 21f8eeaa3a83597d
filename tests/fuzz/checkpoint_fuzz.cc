// Random damage to safetensors headers and to manifests with valid checksums: every input is either
// refused with an Error or describes only data inside its files. Most useful under ASan and UBSan.
//
// MEGATRON_FUZZ_SECONDS sets how long each target runs (default 2).
#include <gtest/gtest.h>
#include <xxhash.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/manifest.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {
namespace {

using Random = std::mt19937_64;

std::string contents(const std::string& name) {
  std::ifstream in(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/checkpoint/" + name,
                   std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

// One to four edits: flipped bits, tokens of the grammar, cut, repeated and moved pieces, numbers
// at the edges.
std::string mutated(std::string text, Random& random) {
  static const char* const kTokens[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        "\"",
                                        ",",
                                        ":",
                                        "-",
                                        "0",
                                        "1",
                                        "4",
                                        "99",
                                        "null",
                                        "1e9",
                                        "0.5",
                                        "[]",
                                        "{}",
                                        "\\u0000",
                                        "-1",
                                        "18446744073709551615",
                                        "9223372036854775807",
                                        "4294967296",
                                        "\"F64\"",
                                        "\"BOOL\"",
                                        "[[],[]]",
                                        "\"flat\":[1,2],",
                                        "\"file\":1,",
                                        "\"__metadata__\":{},",
                                        "\"..\"",
                                        "[[[[[[[["};
  for (uint64_t edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
    const size_t at = random() % text.size(), length = 1 + random() % 24;
    switch (random() % 5) {
      case 0:
        text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        text.replace(at, random() % 3, kTokens[random() % std::size(kTokens)]);
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(random() % text.size(), text.substr(at, length));
        break;
      default:
        text.insert(at, kTokens[random() % std::size(kTokens)]);
    }
  }
  return text;
}

template <class Target>
void fuzz(const char* name, const Target& target) {
  const char* given = std::getenv("MEGATRON_FUZZ_SECONDS");
  const std::chrono::duration<double> budget(given != nullptr ? std::atof(given) : 2.0);
  Random random(std::random_device{}());
  const auto start = std::chrono::steady_clock::now();
  int64_t accepted = 0, refused = 0;
  while (std::chrono::steady_clock::now() - start < budget) {
    for (int i = 0; i < 100; ++i) {
      const uint64_t seed = random();
      Random input_random(seed);
      try {
        target(input_random);
        ++accepted;
      } catch (const Error&) {
        ++refused;
      } catch (const std::exception& error) {
        FAIL() << name << ": seed " << seed << " threw " << error.what();
      }
      if (testing::Test::HasFailure()) FAIL() << name << ": seed " << seed;
    }
  }
  std::printf("%s: %lld inputs accepted, %lld refused\n", name, static_cast<long long>(accepted),
              static_cast<long long>(refused));
  EXPECT_GT(refused, 0);
}

TEST(CheckpointFuzz, SafetensorsHeader) {
  const std::string base = contents("python.safetensors");
  ASSERT_GT(base.size(), 300u);
  fuzz("safetensors", [&](Random& random) {
    const std::string header = mutated(
        base.substr(8, base.find('}', 380) == std::string::npos ? 300 : base.size() - 120), random);
    std::string file = random() % 4 == 0
                           ? mutated(base, random)
                           : base.substr(0, 8) + header + std::string(random() % 200, 'x');
    if (file.size() >= 8 && random() % 2 == 0)
      for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
    const SafetensorsHeader parsed =
        parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "fuzz");
    uint64_t end = 0;
    for (const SafetensorsEntry& entry : parsed.tensors) {
      EXPECT_EQ(entry.begin, end);
      EXPECT_LE(entry.begin, entry.end);
      end = entry.end;
    }
    EXPECT_EQ(parsed.data_begin + end, file.size());
  });
}

TEST(CheckpointFuzz, Manifest) {
  const std::string base = contents("v1/iter_0000100/manifest.json");
  const size_t body_size = base.find("\"manifest_xxh3_128\"");
  ASSERT_NE(body_size, std::string::npos);
  fuzz("manifest", [&](Random& random) {
    const std::string body = mutated(base.substr(0, body_size), random);
    const XXH128_hash_t hash = XXH3_128bits(body.data(), body.size());
    char trailer[96];
    std::snprintf(trailer, sizeof trailer, "\"manifest_xxh3_128\": \"%016llx%016llx\"\n}\n",
                  static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
    const Manifest manifest = parse_manifest(body + trailer, "fuzz");
    for (const auto& [key, tensor] : manifest.tensors) {
      int64_t elements = 1, covered = 0;
      for (int64_t extent : tensor.shape) elements *= extent;
      for (const Fragment& fragment : tensor.fragments) {
        const StoredFile& file = manifest.files.at(static_cast<size_t>(fragment.file));
        covered += fragment.flat_end - fragment.flat_begin;
        EXPECT_LE(
            fragment.offset + static_cast<uint64_t>((fragment.flat_end - fragment.flat_begin) *
                                                    size_of(tensor.dtype)),
            file.bytes - file.header_bytes);
      }
      EXPECT_EQ(covered, elements) << key;
    }
  });
}

}  // namespace
}  // namespace megatron
