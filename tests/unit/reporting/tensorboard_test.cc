#include "megatron/reporting/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

// CRC-32C bit by bit, unlike the table of the writer.
uint32_t slow_crc32c(std::string_view data) {
  uint32_t crc = ~0u;
  for (unsigned char byte : data) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
  }
  return ~crc;
}

// A small protobuf reader: the fields of one message, by number.
struct Message {
  std::map<int, std::vector<std::string>> bytes;
  std::map<int, uint64_t> numbers;

  explicit Message(std::string_view data) {
    size_t at = 0;
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const uint64_t byte = static_cast<unsigned char>(data.at(at++));
        value |= (byte & 0x7F) << shift;
        if (byte < 0x80) return value;
      }
    };
    while (at < data.size()) {
      const uint64_t tag = varint();
      const int field = static_cast<int>(tag >> 3);
      const auto fixed = [&](size_t size) {
        uint64_t value = 0;
        std::memcpy(&value, data.substr(at, size).data(), size);
        at += size;
        return value;
      };
      switch (tag & 7) {
        case 0:
          numbers[field] = varint();
          break;
        case 1:
          numbers[field] = fixed(8);
          break;
        case 5:
          numbers[field] = fixed(4);
          break;
        case 2: {
          const size_t size = varint();
          bytes[field].emplace_back(data.substr(at, size));
          at += size;
          break;
        }
        default:
          throw std::runtime_error("unknown wire type");
      }
    }
  }
};

std::vector<Message> read_events(const std::string& file) {
  std::vector<Message> events;
  const std::string_view data = file;
  const auto u32 = [&](size_t at) {
    uint32_t value;
    std::memcpy(&value, data.substr(at, 4).data(), 4);
    return value;
  };
  const auto mask = [](uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; };
  for (size_t at = 0; at < data.size();) {
    uint64_t size;
    std::memcpy(&size, data.substr(at, 8).data(), 8);
    EXPECT_EQ(u32(at + 8), mask(slow_crc32c(data.substr(at, 8))));
    EXPECT_EQ(u32(at + 12 + size), mask(slow_crc32c(data.substr(at + 12, size))));
    events.emplace_back(data.substr(at + 12, size));
    at += 16 + size;
  }
  return events;
}

TEST(TensorBoard, Crc32cKnownAnswers) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);  // RFC 3720
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
}

TEST(TensorBoard, EventsReadBack) {
  const auto directory = std::filesystem::path(testing::TempDir()) / "tensorboard_test";
  std::filesystem::remove_all(directory);
  TensorBoardSink sink(directory, /*queue_size=*/4);
  const std::string first = read_file(sink.path());
  sink.scalars({7, 123456789012, {{"learning-rate", 1e-4}}, 1.7e9});
  EXPECT_EQ(read_file(sink.path()), first) << "two of four are queued";
  sink.scalars({8, std::nullopt, {{"mem-allocated-count", 3}, {"mem-reserved-bytes", 5}}, 1.7e9});
  EXPECT_EQ(read_events(read_file(sink.path())).size(), 5u) << "four are written";
  sink.scalars({9, std::nullopt, {{"late", 1}}, 1.7e9});
  sink.close();
  const std::vector<Message> events = read_events(read_file(sink.path()));
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[0].bytes.at(3).at(0), "brain.Event:2");
  EXPECT_GT(std::bit_cast<double>(events[0].numbers.at(1)), 1.6e9);
  const Message summary(events[2].bytes.at(5).at(0));
  const Message value(summary.bytes.at(1).at(0));
  EXPECT_EQ(events[2].numbers.at(2), 123456789012u);
  EXPECT_EQ(value.bytes.at(1).at(0), "learning-rate vs samples");
  EXPECT_FLOAT_EQ(std::bit_cast<float>(static_cast<uint32_t>(value.numbers.at(2))), 1e-4f);
  EXPECT_THAT(sink.path().filename().string(), testing::StartsWith("events.out.tfevents."));
}

TEST(TensorBoard, RefusesAnImpossibleDirectory) {
  try {
    TensorBoardSink sink("/proc/nowhere/tb", 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr("--tensorboard-dir /proc/nowhere/tb cannot be created: "));
  }
}

}  // namespace
}  // namespace megatron
