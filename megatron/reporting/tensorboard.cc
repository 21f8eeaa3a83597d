#include "megatron/reporting/tensorboard.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <ctime>

#include "megatron/base/check.h"
#include "megatron/base/process.h"
#include "megatron/reporting/detail/protobuf.h"

namespace megatron {

using namespace protobuf;

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

std::string event_head(double time) {
  std::string event;
  put_tag(event, 1, kFixed64);
  put_fixed(event, time);
  return event;
}

std::string frame(std::string_view event) {
  std::string out;
  put_fixed(out, static_cast<uint64_t>(event.size()));
  put_fixed(out, masked_crc32c(out));
  out += event;
  put_fixed(out, masked_crc32c(event));
  return out;
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  uint32_t crc = ~0u;
  for (unsigned char byte : data) crc = (crc >> 8) ^ kCrcTable[(crc ^ byte) & 0xFF];
  return ~crc;
}

namespace {

std::filesystem::path new_file(const std::filesystem::path& directory) {
  static std::atomic<int> count{0};
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  MEGATRON_CHECK(!error, "--tensorboard-dir ", directory.string(),
                 " cannot be created: ", error.message());
  return directory / cat("events.out.tfevents.", std::time(nullptr), ".", machine_name(), ".",
                         getpid(), ".", count++);
}

}  // namespace

TensorBoardSink::TensorBoardSink(const std::filesystem::path& directory, int64_t queue_size)
    : file_(new_file(directory)),
      queue_size_(queue_size),
      last_write_(std::chrono::steady_clock::now()) {
  std::string event = event_head(seconds_since_1970());
  put_bytes(event, 3, "brain.Event:2");
  file_.append(frame(event));
}

void TensorBoardSink::add(std::string_view tag, double value, int64_t step, double time) {
  std::string entry, summary, event = event_head(time);
  put_bytes(entry, 1, tag);
  put_tag(entry, 2, kFixed32);
  put_fixed(entry, static_cast<float>(value));
  put_bytes(summary, 1, entry);
  put_integer(event, 2, step);
  put_bytes(event, 5, summary);
  queued_ += frame(event);
  ++num_queued_;
}

void TensorBoardSink::scalars(const ScalarSet& set) {
  for (const auto& [tag, value] : set.values) {
    add(tag, value, set.iteration, set.time);
    if (set.samples) add(tag + " vs samples", value, *set.samples, set.time);
  }
  const auto waited = std::chrono::steady_clock::now() - last_write_;
  if (num_queued_ >= queue_size_ || waited > std::chrono::minutes(2)) write();
}

void TensorBoardSink::write() {
  const std::string bytes = std::move(queued_);
  queued_.clear();
  num_queued_ = 0;
  last_write_ = std::chrono::steady_clock::now();
  file_.append(bytes);
}

}  // namespace megatron
