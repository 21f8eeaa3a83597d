#include "megatron/training/tensorboard.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>

#include "megatron/base/check.h"

namespace megatron {

namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = crc_table();

uint32_t masked_crc32c(std::string_view data) {
  const uint32_t crc = crc32c(data);
  return std::rotr(crc, 15) + 0xA282EAD8u;
}

template <class T>
void put_fixed(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_tag(std::string& out, int field, WireType type) { put_varint(out, static_cast<uint64_t>(field) << 3 | type); }

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_tag(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string event_head() {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string event;
  put_tag(event, 1, kFixed64);
  put_fixed(event, now.count());
  return event;
}

std::string host_name() {
  char name[256] = "localhost";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  uint32_t crc = ~0u;
  for (unsigned char byte : data) crc = (crc >> 8) ^ kCrcTable[(crc ^ byte) & 0xFF];
  return ~crc;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory) {
  static std::atomic<int> count{0};
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  MEGATRON_CHECK(!error, "--tensorboard-dir ", directory.string(), " cannot be created: ", error.message());
  path_ = directory / cat("events.out.tfevents.", std::time(nullptr), ".", host_name(), ".", getpid(), ".", count++);
  file_.open(path_, std::ios::binary);
  MEGATRON_CHECK(file_, path_.string(), " cannot be written: ", std::strerror(errno));
  std::string event = event_head();
  put_bytes(event, 3, "brain.Event:2");
  record(event);
  file_.flush();
}

void TensorBoardWriter::scalar(std::string_view tag, double value, int64_t step) {
  std::string entry, summary, event = event_head();
  put_bytes(entry, 1, tag);
  put_tag(entry, 2, kFixed32);
  put_fixed(entry, static_cast<float>(value));
  put_bytes(summary, 1, entry);
  put_tag(event, 2, kVarint);
  put_varint(event, static_cast<uint64_t>(step));
  put_bytes(event, 5, summary);
  record(event);
}

void TensorBoardWriter::flush() { file_.flush(); }

void TensorBoardWriter::record(std::string_view event) {
  std::string frame;
  put_fixed(frame, static_cast<uint64_t>(event.size()));
  put_fixed(frame, masked_crc32c(frame));
  frame += event;
  put_fixed(frame, masked_crc32c(event));
  file_ << frame;
}

}  // namespace megatron
