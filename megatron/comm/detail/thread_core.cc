#include "megatron/comm/detail/thread_core.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/detail/reduce_in_order.h"

namespace megatron {

// Note [Waiting for threads] All groups of a job wait under one lock, each rank on a condition
// variable of its own, so that an event wakes only the ranks that can go on. A wait ends when its
// own condition holds, when a rank has failed, when a rank it needs has returned, when all ranks
// wait for each other, or at the deadline; in the last four cases it throws. The first failure is
// kept and rethrown by run_threads(); later ones only unwind.
struct ThreadJob {
  // A rank in a wait.
  struct Waiter {
    int rank;
    const char* what;
    const std::function<bool()>& ready;
    const std::function<std::vector<int>()>& needed;
    bool interruptible;
    std::condition_variable woken;
  };
  explicit ThreadJob(int size, double timeout) : timeout_seconds(timeout), returned(size, false) {}
  void fail_if_nobody_can_go_on() const;
  void fail(int rank, std::exception_ptr error);  // keeps the first one; requires the lock
  void wake_ready();                              // those whose condition holds; requires the lock
  void wake_interruptible();                      // a rank has returned; requires the lock

  const double timeout_seconds;
  std::mutex mutex;
  std::exception_ptr failure;  // the first failure
  int failed_rank = -1;        // -1: none
  std::vector<bool> returned;  // by rank of the job
  std::list<Waiter> waiters;   // in order of start
};

// One call as a rank posts it; every rank must post an equal one.
struct ThreadCall {
  const char* op = "";
  DType dtype = DType::kUInt8;
  int64_t count = 0;
  int argument = 0;                              // root, or the kind of reduction
  const void* data = nullptr;                    // read by the peers
  const std::vector<int64_t>* counts = nullptr;  // all_to_all: elements for each peer

  bool same(const ThreadCall& other) const {
    return std::strcmp(op, other.op) == 0 && dtype == other.dtype && count == other.count &&
           argument == other.argument;
  }
  std::string text() const {
    return cat(op, " of ", count, " x ", to_string(dtype),
               argument ? cat(" (argument ", argument, ")") : "");
  }
};

struct ThreadMessage {
  DType dtype;
  std::vector<char> bytes;
};

struct ThreadGroup {
  ThreadGroup(std::shared_ptr<ThreadJob> job, std::vector<int> members)
      : job(std::move(job)),
        members(std::move(members)),
        arrived(this->members.size(), false),
        calls(this->members.size()) {}

  int size() const { return static_cast<int>(members.size()); }
  void fail_if_lost(const char* what, const std::vector<int>& needed) const;
  void wait(std::unique_lock<std::mutex>& lock, int rank, const char* what,
            const std::function<bool()>& ready, const std::function<std::vector<int>()>& needed,
            bool interruptible = true);
  // `interruptible`: a failure may end the wait; otherwise the peers are certain to arrive.
  void arrive_and_wait(int rank, const char* what, bool interruptible);

  const std::shared_ptr<ThreadJob> job;
  const std::vector<int> members;  // ranks of the job, by rank of the group
  // Under job->mutex:
  int64_t generation = 0;
  int num_arrived = 0;
  std::vector<bool> arrived;
  std::map<std::pair<int, int>, std::deque<ThreadMessage>> mail;  // (from, to)
  // Subgroups by name, members and how many times the requesting rank has made one; erased once all
  // members have requested it.
  using SubgroupKey = std::tuple<std::string, std::vector<int>, int>;
  std::map<SubgroupKey, std::pair<std::shared_ptr<ThreadGroup>, size_t>> forming;
  std::map<std::pair<int, std::string>, int> asked;  // by rank, and by name with members
  // Written by one rank before a barrier, read by the others after it:
  std::vector<ThreadCall> calls;
};

namespace {

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += cat(i ? ", " : "", ranks[i]);
  return text;
}

}  // namespace

// Throws if the job has failed or one of the needed ranks (of the job) has returned. Requires the
// lock.
void ThreadGroup::fail_if_lost(const char* what, const std::vector<int>& needed) const {
  MEGATRON_CHECK(job->failed_rank < 0, what, " was cancelled because rank ", job->failed_rank,
                 " failed");
  for (int rank : needed) {
    MEGATRON_CHECK(!job->returned[rank], what, " waits for rank ", rank,
                   ", which has already returned");
  }
}

// Throws on deadlock: every rank that has not returned waits, and no wait can end. Requires the
// lock.
void ThreadJob::fail_if_nobody_can_go_on() const {
  const auto running = static_cast<size_t>(std::count(returned.begin(), returned.end(), false));
  if (waiters.size() < running) return;
  std::string text;
  for (const Waiter& waiter : waiters) {
    if (waiter.ready()) return;
    text += cat(text.empty() ? "" : "; ", "rank ", waiter.rank, " in ", waiter.what, " for ",
                list_ranks(waiter.needed()));
  }
  throw_error(cat("ranks wait for each other: ", text,
                  "\nhint: every rank of a group must make the same calls in the same order"));
}

void ThreadJob::fail(int rank, std::exception_ptr error) {
  if (failed_rank >= 0) return;
  failed_rank = rank;
  failure = std::move(error);
}

void ThreadJob::wake_ready() {
  for (Waiter& waiter : waiters) {
    if (waiter.ready()) waiter.woken.notify_one();
  }
}

void ThreadJob::wake_interruptible() {
  for (Waiter& waiter : waiters) {
    if (waiter.interruptible) waiter.woken.notify_one();
  }
}

// `rank`: this rank in the group; `needed`: global ranks that the wait still depends on.
void ThreadGroup::wait(std::unique_lock<std::mutex>& lock, int rank, const char* what,
                       const std::function<bool()>& ready,
                       const std::function<std::vector<int>()>& needed, bool interruptible) {
  if (ready()) return;
  struct Entry {
    std::list<ThreadJob::Waiter>& waiters;
    const std::list<ThreadJob::Waiter>::iterator place;
    ~Entry() { waiters.erase(place); }  // every exit from here holds the lock
  };
  const Entry entry{job->waiters, job->waiters.emplace(job->waiters.end(), members[rank], what,
                                                       ready, needed, interruptible)};
  std::condition_variable& woken = entry.place->woken;
  if (!interruptible) return woken.wait(lock, ready);
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(job->timeout_seconds));
  while (!ready()) {
    fail_if_lost(what, needed());
    job->fail_if_nobody_can_go_on();
    if (woken.wait_until(lock, deadline) == std::cv_status::timeout && !ready()) {
      fail_if_lost(what, needed());
      const Error error(cat(what, " timed out after ", job->timeout_seconds,
                            " s: ", list_ranks(needed()),
                            " did not arrive\nhint: every rank of a group must make the same calls "
                            "in the same order"));
      // Kept before this rank leaves: one whose deadline is the same moment would name it, too
      job->fail(members[rank], std::make_exception_ptr(error));
      throw error;
    }
  }
}

void ThreadGroup::arrive_and_wait(int rank, const char* what, bool interruptible) {
  std::unique_lock lock(job->mutex);
  const int64_t mine = generation;
  arrived[rank] = true;
  if (++num_arrived == size()) {
    num_arrived = 0;
    arrived.assign(size(), false);
    ++generation;
    job->wake_ready();
    return;
  }
  const auto complete = [&] { return generation != mine; };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (!arrived[r]) ranks.push_back(members[r]);
    }
    return ranks;
  };
  try {
    wait(lock, rank, what, complete, missing, interruptible);
  } catch (...) {
    // Ranks that arrive later must not count this one, which leaves
    arrived[rank] = false;
    --num_arrived;
    throw;
  }
}

ThreadCore::ThreadCore(std::shared_ptr<ThreadGroup> group, int rank)
    : group_(std::move(group)), rank_(rank) {}

int ThreadCore::size() const { return group_->size(); }

// Posts the call, lets every rank read its peers' memory, and returns when all have read.
// `read_peers` must not write to memory that a peer reads. Errors between the two barriers are
// thrown after the second one, which cannot be interrupted, because until then a peer may be
// reading this rank's memory.
void ThreadCore::exchange(const ThreadCall& call, const std::function<void()>& read_peers) {
  group_->calls[rank_] = call;
  group_->arrive_and_wait(rank_, call.op, true);
  std::exception_ptr error;
  try {
    check_calls();
    read_peers();
  } catch (...) {
    error = std::current_exception();
  }
  group_->arrive_and_wait(rank_, call.op, false);
  if (error) std::rethrow_exception(error);
}

void ThreadCore::check_calls() const {
  const ThreadCall& first = group_->calls[0];
  for (int r = 1; r < size(); ++r) {
    const ThreadCall& other = group_->calls[r];
    MEGATRON_CHECK(first.same(other), "ranks of a group made different calls: rank ",
                   group_->members[0], " ", first.text(), ", rank ", group_->members[r], " ",
                   other.text());
  }
}

void ThreadCore::reduce(void* output, const void* input, int64_t first, int64_t count,
                        int64_t total, DType dtype, ReduceOp op, const char* name) {
  const int64_t width = size_of(dtype);
  std::vector<char> result(count * width);
  exchange({name, dtype, total, static_cast<int>(op), input}, [&] {
    std::vector<const char*> inputs;
    for (const ThreadCall& call : group_->calls) {
      inputs.push_back(static_cast<const char*>(call.data) + first * width);
    }
    if (count > 0) reduce_in_order(inputs, result.data(), count, dtype, op);
  });
  if (count > 0) std::memcpy(output, result.data(), result.size());
}

void ThreadCore::all_reduce(void* data, int64_t count, DType dtype, ReduceOp op) {
  reduce(data, data, 0, count, count, dtype, op, "all_reduce");
}

void ThreadCore::reduce_scatter(void* output, const void* input, int64_t count_per_rank,
                                DType dtype, ReduceOp op) {
  reduce(output, input, rank_ * count_per_rank, count_per_rank, count_per_rank, dtype, op,
         "reduce_scatter");
}

void ThreadCore::all_gather(void* output, const void* input, int64_t count_per_rank, DType dtype) {
  const int64_t bytes = count_per_rank * size_of(dtype);
  exchange({"all_gather", dtype, count_per_rank, 0, input}, [&] {
    if (bytes == 0) return;
    for (int r = 0; r < size(); ++r) {
      std::memmove(static_cast<char*>(output) + r * bytes, group_->calls[r].data, bytes);
    }
  });
}

void ThreadCore::all_to_all(void* output, const std::vector<int64_t>& output_counts,
                            const void* input, const std::vector<int64_t>& input_counts,
                            DType dtype) {
  const size_t ranks = static_cast<size_t>(size());
  MEGATRON_CHECK(output_counts.size() == ranks && input_counts.size() == ranks, "all_to_all takes ",
                 ranks, " sizes for each side, got ", input_counts.size(), " to send and ",
                 output_counts.size(), " to receive");
  exchange({"all_to_all", dtype, 0, 0, input, &input_counts}, [&] {
    char* out = static_cast<char*>(output);
    for (int r = 0; r < size(); ++r) {
      const std::vector<int64_t>& sent = *group_->calls[r].counts;
      MEGATRON_CHECK(sent[rank_] == output_counts[r], "all_to_all: rank ", r, " sends ",
                     sent[rank_], " elements to rank ", rank_, ", which expects ",
                     output_counts[r]);
      int64_t skip = 0;
      for (int q = 0; q < rank_; ++q) skip += sent[q];
      const int64_t bytes = sent[rank_] * size_of(dtype);
      if (bytes == 0) continue;
      std::memcpy(out, static_cast<const char*>(group_->calls[r].data) + skip * size_of(dtype),
                  bytes);
      out += bytes;
    }
  });
}

void ThreadCore::broadcast(void* data, int64_t count, DType dtype, int root) {
  check_peer("broadcast from", root);
  exchange({"broadcast", dtype, count, root, data}, [&] {
    if (rank_ != root && count > 0)
      std::memcpy(data, group_->calls[root].data, count * size_of(dtype));
  });
}

void ThreadCore::barrier() {
  exchange({"barrier"}, [] {});
}

void ThreadCore::check_peer(const char* what, int peer) const {
  MEGATRON_CHECK(peer >= 0 && peer < size(), what, " rank ", peer, " in a group of ", size(),
                 " ranks");
}

void ThreadCore::send(const void* data, int64_t count, DType dtype, int peer) {
  check_peer("send to", peer);
  const char* bytes = static_cast<const char*>(data);
  ThreadMessage message{dtype, std::vector<char>(bytes, bytes + count * size_of(dtype))};
  std::lock_guard lock(group_->job->mutex);
  group_->mail[{rank_, peer}].push_back(std::move(message));
  group_->job->wake_ready();
}

void ThreadCore::recv(void* data, int64_t count, DType dtype, int peer) {
  check_peer("recv from", peer);
  std::unique_lock lock(group_->job->mutex);
  auto& queue = group_->mail[{peer, rank_}];
  group_->wait(
      lock, rank_, "recv", [&] { return !queue.empty(); },
      [&] { return std::vector<int>{group_->members[peer]}; });
  const ThreadMessage message = std::move(queue.front());
  queue.pop_front();
  lock.unlock();
  const int64_t got = static_cast<int64_t>(message.bytes.size()) / size_of(message.dtype);
  MEGATRON_CHECK(message.dtype == dtype && got == count, "recv from rank ", peer, " expects ",
                 count, " x ", to_string(dtype), ", rank ", peer, " sent ", got, " x ",
                 to_string(message.dtype));
  if (count > 0) std::memcpy(data, message.bytes.data(), message.bytes.size());
}

int64_t ThreadCore::num_messages(int peer) const {
  check_peer("messages of", peer);
  const std::lock_guard lock(group_->job->mutex);
  return static_cast<int64_t>(group_->mail[{peer, rank_}].size());
}

ThreadCore ThreadCore::subgroup(const std::vector<int>& ranks, const std::string& name) {
  std::vector<int> members;  // ranks of the job
  int rank_in_child = -1;
  for (size_t i = 0; i < ranks.size(); ++i) {
    check_peer("subgroup with", ranks[i]);
    if (ranks[i] == rank_) rank_in_child = static_cast<int>(i);
    members.push_back(group_->members[ranks[i]]);
  }
  MEGATRON_CHECK(rank_in_child >= 0, "rank ", rank_, " asks for the group ", name,
                 ", which it is no member of");
  std::lock_guard lock(group_->job->mutex);
  std::string text = name;
  for (int rank : ranks) text += cat(" ", rank);
  const ThreadGroup::SubgroupKey key(name, ranks, group_->asked[{rank_, text}]++);
  auto& [child, joined] = group_->forming[key];
  if (!child) child = std::make_shared<ThreadGroup>(group_->job, std::move(members));
  ThreadCore core(child, rank_in_child);
  if (++joined == ranks.size()) group_->forming.erase(key);
  return core;
}

void run_threads(int size, const std::function<void(ThreadCore&)>& body, double timeout_seconds) {
  MEGATRON_CHECK(size >= 1, "a run on threads needs at least 1 rank, got ", size);
  auto job = std::make_shared<ThreadJob>(size, timeout_seconds);
  std::vector<int> members(size);
  for (int r = 0; r < size; ++r) members[r] = r;
  auto group = std::make_shared<ThreadGroup>(job, std::move(members));
  const auto run_rank = [&](int rank) {
    std::exception_ptr error;
    try {
      ThreadCore core(group, rank);
      body(core);
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(job->mutex);
    job->returned[rank] = true;
    if (error) job->fail(rank, error);
    job->wake_interruptible();
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) threads.emplace_back(run_rank, r);
  for (std::thread& thread : threads) thread.join();
  if (job->failure) std::rethrow_exception(job->failure);
}

}  // namespace megatron
