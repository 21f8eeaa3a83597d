#include "megatron/reporting/wandb.h"

#include <unistd.h>
#include <zlib.h>

#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/process.h"
#include "megatron/reporting/detail/protobuf.h"

namespace megatron {

using namespace protobuf;

namespace {

constexpr uint64_t kBlock = 32 * 1024;
constexpr uint64_t kPieceHeader = 7;  // u32 CRC of kind and data, u16 length, u8 kind
enum PieceKind : char { kFull = 1, kFirst = 2, kMiddle = 3, kLast = 4 };

// Fields of `Record`, and of the messages in it.
enum RecordField {
  kNum = 1,
  kHistory = 2,
  kSummary = 3,
  kConfig = 5,
  kRun = 17,
  kExit = 18,
  kHeader = 21
};
constexpr int kUpdate = 1;      // field of ConfigRecord and SummaryRecord
constexpr int kItemKey = 1;     // field of their items
constexpr int kNestedKey = 2;   // field of HistoryItem
constexpr int kValueJson = 16;  // field of all items

constexpr const char* kRunName = "megatron-run.json";

void put_piece(std::string& out, PieceKind kind, std::string_view data) {
  const char kind_byte = kind;
  uLong crc = crc32(0, reinterpret_cast<const Bytef*>(&kind_byte), 1);
  crc = crc32(crc, reinterpret_cast<const Bytef*>(data.data()), static_cast<uInt>(data.size()));
  put_fixed(out, static_cast<uint32_t>(crc));
  put_fixed(out, static_cast<uint16_t>(data.size()));
  out.push_back(kind_byte);
  out += data;
}

std::string item(int key_field, std::string_view key, std::string_view json) {
  std::string out;
  put_bytes(out, key_field, key);
  put_bytes(out, kValueJson, json);
  return out;
}

// wandb's JSON has NaN and infinities.
std::string number_json(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  JsonWriter json;
  json.value(value);
  return json.text();
}

std::string new_run_id() {
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string id;
  for (int i = 0; i < 8; ++i) id += kLetters[random() % kLetters.size()];
  return id;
}

// The id of the resumed run, or a new one, which is then stored.
std::string choose_run_id(const WandbSink::Options& options) {
  const std::filesystem::path path = options.folder / "wandb" / kRunName;
  if (options.resumed && std::filesystem::exists(path)) {
    const auto json = nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.value("project", "") == options.project &&
        json.value("entity", "") == options.entity) {
      const std::string id = json.value("run_id", "");
      if (!id.empty() && id.find_first_of("/\\:;,#?'\" ") == std::string::npos) return id;
    }
    log_warning(cat(path.string(), " names no run of the project ", options.project,
                    ": a new W&B run begins"));
  }
  const std::string id = new_run_id();
  JsonWriter json(2);
  json.begin_object()
      .member("run_id", id)
      .member("project", options.project)
      .member("entity", options.entity)
      .end_object();
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  MEGATRON_CHECK(!error, path.parent_path().string(), " cannot be created: ", error.message());
  write_file_atomically(path, json.text() + "\n");
  return id;
}

std::filesystem::path new_run_file(const std::filesystem::path& folder, const std::string& id) {
  // Take the next second if this one has a run already
  for (std::time_t time = std::time(nullptr);; ++time) {
    const std::filesystem::path run =
        folder / "wandb" / cat("offline-run-", format_time(time, "%Y%m%d_%H%M%S"), "-", id);
    if (std::filesystem::exists(run)) continue;
    std::error_code error;
    std::filesystem::create_directories(run / "files", error);
    MEGATRON_CHECK(!error, run.string(), " cannot be created: ", error.message());
    return run / cat("run-", id, ".wandb");
  }
}

std::string run_message(const WandbSink::Options& options, const std::string& id,
                        double start_time) {
  std::string config, time, run;
  const auto settings = nlohmann::ordered_json::parse(options.settings_json);
  for (const auto& [key, value] : settings.items())
    put_bytes(config, kUpdate, item(kItemKey, key, value.dump()));
  put_integer(time, 1, static_cast<int64_t>(start_time));
  put_integer(time, 2, static_cast<int64_t>((start_time - std::floor(start_time)) * 1e9));
  put_bytes(run, 1, id);
  if (!options.entity.empty()) put_bytes(run, 2, options.entity);
  put_bytes(run, 3, options.project);
  put_bytes(run, 4, config);
  if (!options.name.empty()) put_bytes(run, 8, options.name);
  put_bytes(run, 13, machine_name());
  put_bytes(run, 17, time);
  put_integer(run, 24, 1);  // resume=allow: a later file may continue this run
  return run;
}

}  // namespace

WandbLog::WandbLog(std::filesystem::path path) : file_(std::move(path)) {
  MEGATRON_CHECK(file_.size() == 0, file_.path().string(), " exists already");
  file_.append(std::string_view(":W&B\xE1\xBE\0", 7));
}

void WandbLog::append(std::string_view record) {
  std::string out;
  uint64_t at = file_.size();
  bool first = true;
  do {
    const uint64_t left = kBlock - at % kBlock;
    if (left < kPieceHeader) {  // too short for a piece: pad the block
      out.append(left, '\0');
      at += left;
      continue;
    }
    const std::string_view piece = record.substr(0, left - kPieceHeader);
    record.remove_prefix(piece.size());
    put_piece(out, record.empty() ? (first ? kFull : kLast) : (first ? kFirst : kMiddle), piece);
    at += kPieceHeader + piece.size();
    first = false;
  } while (first || !record.empty());
  file_.append(out);
}

WandbSink::WandbSink(const Options& options)
    : run_id_(choose_run_id(options)),
      log_(new_run_file(options.folder, run_id_)),
      start_time_(seconds_since_1970()) {
  std::string version, header;
  put_bytes(version, 1, MEGATRON_VERSION);
  put_bytes(version, 2, "0.70.0");  // the oldest wandb that reads this
  put_bytes(header, 1, version);
  write(kHeader, header);
  write(kRun, run_message(options, run_id_, start_time_));
}

void WandbSink::write(int field, std::string_view message) {
  std::string record;
  put_integer(record, kNum, ++num_records_);
  put_bytes(record, field, message);
  log_.append(record);
}

void WandbSink::record(const MetricsRecord& record) {
  if (record.type() == "end") {
    exit_code_ = 0;
  } else if (record.type() == "start") {  // facts of the start: one item of the configuration
    JsonWriter json;
    json.begin_object();
    for (const auto& [name, value] : record.members()) write_value(json.key(name), value);
    json.end_object();
    std::string config;
    put_bytes(config, kUpdate, item(kItemKey, "run", json.text()));
    write(kConfig, config);
  }
}

void WandbSink::scalars(const ScalarSet& set) {
  if (set.iteration != row_iteration_) write_row();
  row_iteration_ = set.iteration;
  if (row_.empty()) {
    row_.emplace_back("_step", std::to_string(set.iteration));
    row_.emplace_back("_timestamp", number_json(set.time));
    row_.emplace_back("_runtime", number_json(set.time - start_time_));
    if (set.samples) row_.emplace_back("consumed_samples", std::to_string(*set.samples));
  }
  for (const auto& [tag, value] : set.values) row_.emplace_back(tag, number_json(value));
}

void WandbSink::write_row() {
  if (row_.empty()) return;
  std::string step, history;
  put_integer(step, 1, row_iteration_);
  for (const auto& [key, json] : row_) {
    put_bytes(history, 1, item(kNestedKey, key, json));
    summary_[key] = json;
  }
  put_bytes(history, 2, step);
  row_.clear();
  write(kHistory, history);
  if (std::chrono::steady_clock::now() - last_summary_ > std::chrono::seconds(15)) write_summary();
}

void WandbSink::write_summary() {
  last_summary_ = std::chrono::steady_clock::now();
  std::string summary;
  for (const auto& [key, json] : summary_) put_bytes(summary, kUpdate, item(kItemKey, key, json));
  write(kSummary, summary);
}

void WandbSink::close() {
  write_row();
  if (!summary_.empty()) write_summary();
  std::string exit;
  put_integer(exit, 1, exit_code_);
  put_integer(exit, 2, static_cast<int64_t>(seconds_since_1970() - start_time_));
  write(kExit, exit);
}

}  // namespace megatron
