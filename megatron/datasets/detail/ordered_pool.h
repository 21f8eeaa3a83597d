// A pipeline from one producer through workers to one consumer that keeps the producer's order and
// bounds the total weight of items in flight.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace megatron {

// In and Out must be movable. `produce` runs on a separate thread, `work` on `workers` threads,
// `consume` on the calling thread. The first exception in the order of the items is rethrown after
// all threads have stopped.
template <class In, class Out>
class OrderedPool {
 public:
  using Emit = std::function<bool(In)>;  // false: stop producing

  OrderedPool(int workers, uint64_t max_weight, std::function<uint64_t(const In&)> weight)
      : workers_(workers), max_weight_(max_weight), weight_(std::move(weight)) {}

  // `make_worker` gives each worker its own function.
  void run(const std::function<void(const Emit&)>& produce,
           const std::function<std::function<Out(In)>()>& make_worker,
           const std::function<void(Out)>& consume) {
    std::vector<std::thread> threads;
    threads.emplace_back([&] { produce_all(produce); });
    for (int i = 0; i < workers_; ++i) threads.emplace_back([&] { work_all(make_worker); });
    std::exception_ptr error;
    try {
      consume_all(consume);
    } catch (...) {
      error = std::current_exception();
    }
    stop();
    for (std::thread& thread : threads) thread.join();
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Input {
    int64_t number;
    uint64_t weight;
    In item;
  };
  struct Result {
    uint64_t weight = 0;
    std::vector<Out> item;  // one, or none on an error
    std::exception_ptr error;
  };

  bool emit(In item) {
    const uint64_t weight = weight_(item);
    std::unique_lock lock(mutex_);
    // One item may always be in flight, however heavy.
    space_.wait(lock,
                [&] { return stopped_ || in_flight_ == 0 || in_flight_ + weight <= max_weight_; });
    if (stopped_) return false;
    in_flight_ += weight;
    inputs_.push_back({produced_++, weight, std::move(item)});
    input_ready_.notify_one();
    return true;
  }

  void produce_all(const std::function<void(const Emit&)>& produce) {
    std::exception_ptr error;
    try {
      produce([this](In item) { return emit(std::move(item)); });
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (error) {
      Result& result = results_[produced_++];
      result.error = error;
    }
    finished_ = true;
    input_ready_.notify_all();
    result_ready_.notify_all();
  }

  void work_all(const std::function<std::function<Out(In)>()>& make_worker) {
    const std::function<Out(In)> work = make_worker();
    std::unique_lock lock(mutex_);
    for (;;) {
      input_ready_.wait(lock, [&] { return stopped_ || finished_ || !inputs_.empty(); });
      if (stopped_ || inputs_.empty()) return;
      Input input = std::move(inputs_.front());
      inputs_.pop_front();
      lock.unlock();
      Result result;
      result.weight = input.weight;
      try {
        result.item.push_back(work(std::move(input.item)));
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      results_[input.number] = std::move(result);
      result_ready_.notify_one();
    }
  }

  void consume_all(const std::function<void(Out)>& consume) {
    std::unique_lock lock(mutex_);
    for (int64_t next = 0;; ++next) {
      result_ready_.wait(
          lock, [&] { return results_.count(next) > 0 || (finished_ && next == produced_); });
      const auto found = results_.find(next);
      if (found == results_.end()) return;
      Result result = std::move(found->second);
      results_.erase(found);
      lock.unlock();
      if (result.error) std::rethrow_exception(result.error);
      consume(std::move(result.item.front()));
      result.item.clear();
      lock.lock();
      in_flight_ -= result.weight;
      space_.notify_one();
    }
  }

  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    space_.notify_all();
    input_ready_.notify_all();
  }

  int workers_;
  uint64_t max_weight_;
  std::function<uint64_t(const In&)> weight_;
  std::mutex mutex_;
  std::condition_variable space_, input_ready_, result_ready_;
  std::deque<Input> inputs_;
  std::map<int64_t, Result> results_;
  int64_t produced_ = 0;
  uint64_t in_flight_ = 0;
  bool finished_ = false, stopped_ = false;
};

}  // namespace megatron
