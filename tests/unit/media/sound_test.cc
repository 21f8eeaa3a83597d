#include "megatron/media/sound.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "megatron/media/log_mel.h"
#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

nlohmann::json golden_sounds() {
  return nlohmann::json::parse(
      read_file(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/media/sounds.json"));
}

std::vector<uint8_t> sound_file(const std::string& name) {
  const auto sounds = golden_sounds();
  for (const auto& row : sounds.at("files"))
    if (row.at("name") == name) return bytes_of_base64(row.at("file"));
  throw_error("no sound " + name);
}

TEST(Sound, SamplesAreTheFiles) {
  int count = 0;
  const auto sounds = golden_sounds();
  for (const auto& row : sounds.at("files")) {
    if (!row.contains("samples")) continue;
    SCOPED_TRACE(row.at("name").get<std::string>());
    const auto file = bytes_of_base64(row.at("file"));
    const auto samples = decode_sound({file, "a"});
    ASSERT_EQ(std::ssize(samples), row.at("samples").get<int64_t>());
    EXPECT_EQ(read_sound_header({file, "a"}).samples, std::ssize(samples));
    // Vorbis is computed in floats, which versions of its library round differently.
    const uint32_t crc =
        crc_of({reinterpret_cast<const uint8_t*>(samples.data()), 4 * samples.size()});
    EXPECT_TRUE(row.at("name") == "OGG VORBIS" || crc == row.at("crc").get<uint32_t>());
    for (size_t i = 0; i < row.at("some").size(); ++i)
      EXPECT_NEAR(samples[50 * i], row.at("some")[i].get<float>(), 1e-5);
    ++count;
  }
  EXPECT_EQ(count, 10);
}

TEST(Sound, OtherRatesChannelsAndFormatsAreRefused) {
  const auto error = [](const std::vector<uint8_t>& file) {
    return error_of([&] { decode_sound({file, "x.wav"}); });
  };
  EXPECT_EQ(error(sound_file("44.1 kHz")),
            "x.wav: byte 0: the sound has 44100 samples a second and 1 channels; expected 16000 "
            "and 1: convert it first");
  EXPECT_THAT(error(sound_file("stereo")), HasSubstr("16000 samples a second and 2 channels"));
  EXPECT_EQ(error({'I', 'D', '3', 4}),
            "x.wav: byte 0: MP3 is not read; expected WAV, FLAC or Ogg "
            "Vorbis");
  EXPECT_EQ(error({'h', 'e', 'y'}), "x.wav: byte 0: neither WAV, FLAC nor Ogg Vorbis");
  EXPECT_EQ(error({}), "x.wav: byte 0: the file is empty");
  std::vector<uint8_t> empty = sound_file("WAV PCM_16");
  empty.resize(44);
  std::fill(empty.begin() + 40, empty.end(), uint8_t{0});
  EXPECT_EQ(error(empty), "x.wav: byte 0: the sound has no samples");
  EXPECT_THAT(error_of([] {
                read_sound_header({sound_file("WAV PCM_16"), "x"}, {.max_audio_samples = 499});
              }),
              HasSubstr("the sound has 500 samples; expected at most 499"));
}

TEST(Sound, FilesThatAreCutAreNamed) {
  for (const char* name : {"WAV PCM_16", "WAVEX PCM_16", "FLAC PCM_16", "OGG VORBIS"}) {
    const auto file = sound_file(name);
    for (size_t size = 0; size < file.size(); size += size < 200 ? 1 : 13)
      EXPECT_THAT(error_of([&] { decode_sound({std::span(file).first(size), "3, a.tar: b"}); }),
                  AllOf(StartsWith("3, a.tar: b: byte "), HasSubstr(": ")))
          << name << " of " << size << " bytes";
  }
}

// Of a header each is named or read; of samples it is another sample, as WAV has no checksum.
TEST(Sound, FlippedBits) {
  const std::vector<uint8_t> file = sound_file("WAV PCM_16");
  const std::vector<float> whole = decode_sound({file, "x.wav"});
  int refused = 0;
  for (size_t bit = 0; bit < 8 * 44; ++bit) {
    std::vector<uint8_t> damaged = file;
    damaged[bit / 8] = static_cast<uint8_t>(damaged[bit / 8] ^ 1 << bit % 8);
    const std::string error = error_of([&] { decode_sound({damaged, "x.wav"}); });
    EXPECT_TRUE(error.empty() || error.starts_with("x.wav: byte ")) << bit << " " << error;
    refused += !error.empty();
  }
  EXPECT_GT(refused, 50);
  std::vector<uint8_t> damaged = file;
  damaged[44 + 2 * 28] ^= 4;
  std::vector<float> other = decode_sound({damaged, "x.wav"});
  EXPECT_EQ(std::abs(std::exchange(other[28], whole[28]) - whole[28]), 4.0F / 32768);
  EXPECT_EQ(other, whole);
}

std::vector<float> chirp(int64_t samples) {
  std::vector<float> out;
  for (int64_t i = 0; i < samples; ++i) {
    const double t = static_cast<double>(i % 16'000) / 16'000;
    out.push_back(static_cast<float>(0.5 * std::sin(2 * std::numbers::pi * 440 * t) +
                                     0.25 * std::sin(2 * std::numbers::pi * (1000 + 500 * t) * t)));
  }
  return out;
}

std::vector<float> clip_of(const std::string& name) {
  if (name == "chirp") return chirp(16'000);
  if (name == "long") return chirp(480'000);
  if (name == "silence") return std::vector<float>(16'000, 0.0f);
  std::vector<float> out(name == "short" ? 1 : 5000);
  uint64_t state = 1;
  for (float& x : out) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<float>(static_cast<double>(state >> 40) / (1 << 23) - 1);
  }
  return out;
}

TEST(LogMel, FeaturesAreThoseOfTransformers) {
  double largest = 0;
  int count = 0;
  const auto sounds = golden_sounds();
  for (const auto& row : sounds.at("features")) {
    const int mels = row.at("mels");
    const auto features = log_mel(clip_of(row.at("clip")), mels);
    ASSERT_EQ(std::ssize(features), mels * 3000);
    size_t i = 0;
    for (int m = 0; m < mels; m += 7) {
      for (const int64_t frame : row.at("frames")) {
        const double wanted = row.at("values").at(i++);
        largest = std::max(largest, std::abs(features[m * 3000 + frame] - wanted));
        ++count;
      }
    }
    EXPECT_NEAR(*std::max_element(features.begin(), features.end()),
                row.at("largest").get<double>(), 1e-5);
  }
  EXPECT_LT(largest, 1e-4);
  EXPECT_GT(count, 1000);
}

TEST(LogMel, OfAChirp) {
  const auto features = log_mel(chirp(16'000), 80);
  const auto at = [&](int mel, int frame) { return features[mel * 3000 + frame]; };
  EXPECT_NEAR(at(0, 0), 1.0255153, 1e-4);
  EXPECT_NEAR(at(10, 50), 1.3487383, 1e-4);
  EXPECT_NEAR(at(40, 50), -0.0090864, 1e-4);
  EXPECT_NEAR(at(10, 100), 1.2693720, 1e-4);
  EXPECT_NEAR(at(5, 10), -0.5617857, 1e-4);
  EXPECT_NEAR(*std::max_element(features.begin(), features.end()), 1.4382143, 1e-4);
  EXPECT_NEAR(log_mel(chirp(16'000), 128)[20 * 3000 + 50], 1.2873964, 1e-4);
  for (const float x : log_mel(std::vector<float>(100, 0.0f), 80)) ASSERT_EQ(x, -1.5f);
}

TEST(LogMel, Filters) {
  const auto filters = mel_filters(80);
  EXPECT_NEAR(filters[0][1], 0.024862594, 1e-9);
  EXPECT_NEAR(filters[40][42], 0.005411105, 1e-9);
  EXPECT_NEAR(filters[40][43], 0.014735566, 1e-9);
  EXPECT_NEAR(filters[40][44], 0.00651819, 1e-8);
  int count = 0;
  double sum = 0;
  for (const auto& filter : filters) {
    count += static_cast<int>(
        std::count_if(filter.begin(), filter.end(), [](double x) { return x > 0; }));
    sum += std::accumulate(filter.begin(), filter.end(), 0.0);
  }
  EXPECT_EQ(count, 391);
  EXPECT_NEAR(sum, 1.9990241, 1e-6);
}

TEST(LogMel, FramesAndTokens) {
  EXPECT_EQ(mel_frames(16'000), 100);
  EXPECT_EQ(mel_frames(15'999), 100);
  EXPECT_EQ(mel_frames(1), 1);
  EXPECT_EQ(qwen2_audio_tokens(100), 25);
  EXPECT_EQ(qwen2_audio_tokens(101), 25);
  EXPECT_EQ(qwen2_audio_tokens(3), 1);
  EXPECT_EQ(qwen2_audio_tokens(1), 0);
  EXPECT_EQ(voxtral_tokens(1), 375);
  EXPECT_EQ(voxtral_tokens(480'000), 375);
  EXPECT_EQ(voxtral_tokens(480'001), 750);
  EXPECT_EQ(error_of([] { log_mel({}, 80); }), "a sound without samples has no features");
  EXPECT_EQ(log_mel(std::vector<float>(480'001), 80).size(), 80u * 6000);
}

}  // namespace
}  // namespace megatron
