#include "megatron/reporting/metrics_queue.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/process.h"

namespace megatron {

MetricsRecord::MetricsRecord(std::string_view type) : type_(type), time_(seconds_since_1970()) {}

std::optional<double> MetricsRecord::number(std::string_view name) const {
  for (const auto& [key, value] : members_) {
    if (key != name) continue;
    if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
    if (const auto* real = std::get_if<double>(&value)) return *real;
  }
  return std::nullopt;
}

std::string MetricsRecord::text(std::string_view name) const {
  for (const auto& [key, value] : members_)
    if (const auto* text = std::get_if<std::string>(&value); text != nullptr && key == name)
      return *text;
  return {};
}

void write_value(JsonWriter& json, const MetricsRecord::Value& value) {
  std::visit(
      [&](const auto& v) {
        if constexpr (std::is_same_v<std::decay_t<decltype(v)>, MetricsRecord::Json>) {
          json.raw(v.text);
        } else {
          json.value(v);
        }
      },
      value);
}

// A sink, its queue and its thread. The thread shares ownership: a sink that hangs is abandoned
// with its thread at the end of the run.
class MetricsQueue::Lane : public std::enable_shared_from_this<Lane> {
 public:
  using Item = std::variant<std::shared_ptr<const MetricsRecord>, std::shared_ptr<const ScalarSet>>;

  Lane(std::unique_ptr<MetricsSink> sink, Options options)
      : sink_(std::move(sink)), options_(options) {}
  void start() {
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  bool takes_scalars() const { return sink_->takes_scalars(); }

  void push(Item item, bool must_keep) {
    bool first_drop = false;
    {
      const std::lock_guard lock(mutex_);
      if (must_keep || queue_.size() < options_.capacity) {
        queue_.push_back(std::move(item));
      } else {
        first_drop = dropped_++ == 0;
      }
    }
    if (first_drop) log_warning(cat(sink_->name(), " is too slow: some records are dropped"));
    wake_.notify_one();
  }

  // Waits until the queue is empty; false: gave up.
  bool flush() {
    std::unique_lock lock(mutex_);
    return wait_for_progress(lock, [&] { return queue_.empty() && !busy_; });
  }

  void close() {
    std::unique_lock lock(mutex_);
    closing_ = true;
    wake_.notify_one();
    const bool done = wait_for_progress(lock, [&] { return finished_; });
    const size_t dropped = dropped_ + (done ? 0 : queue_.size() + 1), failed = failed_;
    lock.unlock();
    if (done) {
      thread_.join();
    } else {
      thread_.detach();
      log_warning(cat(sink_->name(), " has made no progress for ", options_.patience_seconds,
                      " seconds and is abandoned"));
    }
    if (failed + dropped > 0)
      log_warning(cat(sink_->name(), " is incomplete: ", failed, " writes failed, ", dropped,
                      " records were dropped"));
  }

 private:
  template <class Done>
  bool wait_for_progress(std::unique_lock<std::mutex>& lock, Done done) {
    while (!done()) {
      const uint64_t before = written_;
      const std::chrono::duration<double> patience(options_.patience_seconds);
      if (!progress_.wait_for(lock, patience, [&] { return done() || written_ != before; }))
        return false;
    }
    return true;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) break;
      const Item item = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      attempt([&] { write(item); });
      lock.lock();
      busy_ = false;
      ++written_;
      progress_.notify_all();
    }
    lock.unlock();
    attempt([&] { sink_->close(); });
    lock.lock();
    finished_ = true;
    progress_.notify_all();
  }

  void write(const Item& item) {
    if (const auto* record = std::get_if<0>(&item)) {
      sink_->record(**record);
    } else {
      sink_->scalars(*std::get<1>(item));
    }
  }

  template <class Action>
  void attempt(Action action) {
    std::string problem;
    try {
      action();
      return;
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const std::lock_guard lock(mutex_);
    if (failed_++ > 0) return;
    const std::string name = sink_->name();
    // An error of the file's folder does not name the file.
    const bool named = problem.find(name) != std::string::npos;
    log_warning(cat(named ? "" : name + ": ", problem, "; training continues without it"));
  }

  const std::unique_ptr<MetricsSink> sink_;
  const Options options_;
  std::thread thread_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable wake_, progress_;
  std::deque<Item> queue_;
  bool busy_ = false, closing_ = false, finished_ = false;
  uint64_t written_ = 0;
  size_t dropped_ = 0, failed_ = 0;
};

MetricsQueue::MetricsQueue() = default;
MetricsQueue::MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks)
    : MetricsQueue(std::move(sinks), Options{}) {}
MetricsQueue::MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks, Options options) {
  for (std::unique_ptr<MetricsSink>& sink : sinks) {
    lanes_.push_back(std::make_shared<Lane>(std::move(sink), options));
    lanes_.back()->start();
  }
}
MetricsQueue::MetricsQueue(MetricsQueue&&) noexcept = default;
MetricsQueue& MetricsQueue::operator=(MetricsQueue&& other) noexcept {
  std::swap(lanes_, other.lanes_);
  return *this;
}
MetricsQueue::~MetricsQueue() { close(); }

bool MetricsQueue::takes_scalars() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return lane->takes_scalars(); });
}

void MetricsQueue::write(MetricsRecord record) {
  if (lanes_.empty()) return;
  const bool must_keep = record.type() == "start" || record.type() == "end";
  const auto shared = std::make_shared<const MetricsRecord>(std::move(record));
  for (const auto& lane : lanes_) lane->push(shared, must_keep);
}

void MetricsQueue::write(ScalarSet scalars) {
  if (scalars.values.empty()) return;
  scalars.time = seconds_since_1970();
  const auto shared = std::make_shared<const ScalarSet>(std::move(scalars));
  for (const auto& lane : lanes_)
    if (lane->takes_scalars()) lane->push(shared, /*must_keep=*/false);
}

void MetricsQueue::flush() {
  for (const auto& lane : lanes_) lane->flush();
}

void MetricsQueue::close() {
  for (const auto& lane : lanes_) lane->close();
  lanes_.clear();
}

}  // namespace megatron
