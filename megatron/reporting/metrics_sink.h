// Records of a run's metrics, and the interface of their sinks: metrics.jsonl, TensorBoard, Weights
// & Biases, a file for Prometheus.
//
// Adding a sink: a class in a new file, its line in the table of metrics_sinks.cc, its #include
// there, its source in CMakeLists.txt.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace megatron {

class JsonWriter;

// One event with named values, in order. Types and their values: metrics_file.h.
class MetricsRecord {
 public:
  struct Json {
    std::string text;
  };
  using Value = std::variant<bool, int64_t, double, std::string, Json>;

  explicit MetricsRecord(std::string_view type);  // time() is now

  template <class T>
  MetricsRecord& member(std::string_view name, const T& value) {
    members_.emplace_back(name, to_value(value));
    return *this;
  }
  // A value that is JSON already: an object or an array.
  MetricsRecord& json(std::string_view name, std::string text) {
    members_.emplace_back(name, Json{std::move(text)});
    return *this;
  }

  const std::string& type() const { return type_; }
  double time() const { return time_; }  // seconds since 1970
  const std::vector<std::pair<std::string, Value>>& members() const { return members_; }
  // The value of a member that is a number; nothing: no such member.
  std::optional<double> number(std::string_view name) const;
  // The value of a member that is a string; empty: no such member.
  std::string text(std::string_view name) const;

 private:
  static Value to_value(bool value) { return value; }
  template <std::integral T>
    requires(!std::same_as<T, bool> && !std::same_as<T, char>)
  static Value to_value(T value) {
    return static_cast<int64_t>(value);
  }
  static Value to_value(double value) { return value; }
  static Value to_value(std::string_view value) { return std::string(value); }
  static Value to_value(const std::string& value) { return value; }
  static Value to_value(const char* value) { return std::string(value); }

  std::string type_;
  double time_ = 0;
  std::vector<std::pair<std::string, Value>> members_;
};

// Numbers under Megatron-LM's TensorBoard tags.
struct ScalarSet {
  int64_t iteration = 0;
  // Consumed samples; if given, plotters can also use them as x axis
  std::optional<int64_t> samples;
  std::vector<std::pair<std::string, double>> values;
  double time = 0;  // seconds since 1970; MetricsQueue sets it
};

// Called by one thread, not the training thread. An Error is logged once and the record counted as
// missing; later records are still tried.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual std::string name() const = 0;  // for messages, such as the file
  virtual void record(const MetricsRecord& record) = 0;
  virtual bool takes_scalars() const { return false; }
  virtual void scalars(const ScalarSet&) {}
  virtual void close() {}  // after the last record
};

void write_value(JsonWriter& json, const MetricsRecord::Value& value);

}  // namespace megatron
