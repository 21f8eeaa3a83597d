#include "megatron/comm/collective_history.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/comm/detail/element_type.h"
#include "megatron/comm/detail/steady_seconds.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// How often begin() looks for calls that have finished in the meantime, when nobody else asks.
constexpr int64_t kSettleEvery = 64;
// How long others wait for who asks the driver.
constexpr std::chrono::milliseconds kMostWait{100};

class RecordedBackend final : public Backend {
 public:
  RecordedBackend(std::shared_ptr<Backend> inner, std::shared_ptr<CollectiveHistory> history,
                  std::string name, std::vector<int> members, std::string channel)
      : inner_(std::move(inner)),
        history_(std::move(history)),
        group_(group_text(name, members)),
        members_(std::move(members)),
        channel_(std::move(channel)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    const int64_t id = begin(reduction("all_reduce", op), tensor);
    return issued(id, inner_->all_reduce(std::move(tensor), op));
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    const int64_t id = begin("all_gather", input);
    return issued(id, inner_->all_gather(std::move(output), std::move(input)));
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    const int64_t id = begin(reduction("reduce_scatter", op), output);
    return issued(id, inner_->reduce_scatter(std::move(output), std::move(input), op));
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    const int64_t id = begin("all_to_all", input);
    return issued(id, inner_->all_to_all(std::move(output), std::move(output_sizes),
                                         std::move(input), std::move(input_sizes)));
  }
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    const int64_t id = begin(cat("broadcast from rank ", members_[root]), tensor);
    return issued(id, inner_->broadcast(std::move(tensor), root));
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    const int64_t id = begin_message("send", rank(), peer, tensor);
    return issued(id, inner_->send(std::move(tensor), peer));
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    const int64_t id = begin_message("recv", peer, rank(), tensor);
    return issued(id, inner_->recv(std::move(tensor), peer));
  }
  void barrier() override {
    CollectiveCall call;
    call.op = "barrier";
    call.group = group_;
    call.channel = channel_;
    call.members = members_;
    const int64_t id = history_->begin(std::move(call));
    inner_->barrier();
    history_->issued(id, nullptr);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    std::vector<int> members;
    for (int rank : ranks) members.push_back(members_.at(rank));
    std::string channel = group_text(name, members);
    const int made = ++made_[channel];
    if (made > 1) channel += cat(" #", made);
    return std::make_shared<RecordedBackend>(inner_->subgroup(ranks, name, use), history_, name,
                                             std::move(members), cat(channel_, " / ", channel));
  }

 private:
  static std::string reduction(const char* op, ReduceOp reduce) {
    return reduce == ReduceOp::kSum ? op : cat(op, " (max)");
  }

  CollectiveCall describe(std::string op, const at::Tensor& tensor) const {
    CollectiveCall call;
    call.op = std::move(op);
    call.dtype = element_type_name(tensor.scalar_type());
    call.count = tensor.numel();
    call.bytes = static_cast<int64_t>(tensor.nbytes());
    call.group = group_;
    call.channel = channel_;
    call.members = members_;
    return call;
  }
  int64_t begin(std::string op, const at::Tensor& tensor) {
    return history_->begin(describe(std::move(op), tensor));
  }
  int64_t begin_message(const char* op, int from, int to, const at::Tensor& tensor) {
    CollectiveCall call =
        describe(cat(op, " from rank ", members_[from], " to rank ", members_[to]), tensor);
    call.members = {members_[from], members_[to]};
    call.channel += cat(" from ", members_[from], " to ", members_[to],
                        from == rank() ? " (sent)" : " (received)");
    return history_->begin(std::move(call));
  }
  std::shared_ptr<Work> issued(int64_t id, std::shared_ptr<Work> work) {
    history_->issued(id, work->progress());
    return work;
  }

  std::shared_ptr<Backend> inner_;
  std::shared_ptr<CollectiveHistory> history_;
  std::string group_;
  std::vector<int> members_;
  std::string channel_;
  std::map<std::string, int> made_;  // number of subgroups of equal name and members
};

}  // namespace

std::string call_text(const std::string& op, int64_t count, const std::string& dtype,
                      int64_t bytes) {
  return dtype.empty() ? op : cat(op, " of ", count, " x ", dtype, " (", format_bytes(bytes), ")");
}

std::string to_string(const CollectiveCall& call) {
  return cat(call_text(call.op, call.count, call.dtype, call.bytes), " over ", call.group,
             ", number ", call.sequence);
}

std::string group_text(const std::string& name, const std::vector<int>& members) {
  constexpr size_t kWhole = 16, kEnds = 4;
  std::string text = name + " {";
  for (size_t i = 0; i < members.size(); ++i) {
    if (members.size() > kWhole && i == kEnds) {
      text += cat(", ... ", members.size() - 2 * kEnds, " more ...");
      i = members.size() - kEnds;
    }
    text += cat(i ? ", " : "", members[i]);
  }
  return text + "}";
}

struct CollectiveHistory::State {
  explicit State(size_t kept) : keep(kept) {}

  struct Entry {
    CollectiveCall call;
    std::shared_ptr<const Progress> progress;
  };

  // Moves calls that have finished to the finished ones. Asks, and lets go of what it asked,
  // without the lock.
  void settle();
  void settle_when_asked();
  // Waits for that, but not for long. Requires the lock.
  void ask(std::unique_lock<std::mutex>& lock);
  void finish(Entry& entry);

  const size_t keep;
  std::mutex mutex;
  int64_t next_id = 0;
  std::map<int64_t, Entry> under_way;
  std::deque<CollectiveCall> finished;
  std::map<std::string, int64_t> issued;

  std::condition_variable asked, settled;
  int64_t requests = 0, answered = 0;
  bool leaving = false;
};

void CollectiveHistory::State::finish(Entry& entry) {
  entry.call.finished = steady_seconds();
  finished.push_back(std::move(entry.call));
  if (finished.size() > keep) finished.pop_front();
}

void CollectiveHistory::State::settle() {
  std::vector<std::pair<int64_t, std::shared_ptr<const Progress>>> open;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [id, entry] : under_way)
      if (entry.progress) open.emplace_back(id, entry.progress);
  }
  std::erase_if(open, [](const auto& call) { return !call.second->finished(); });
  const std::lock_guard lock(mutex);
  for (const auto& [id, progress] : open) {
    const auto entry = under_way.find(id);
    if (entry == under_way.end()) continue;  // by another thread
    finish(entry->second);
    under_way.erase(entry);
  }
}

void CollectiveHistory::State::settle_when_asked() {
  std::unique_lock lock(mutex);
  for (;;) {
    asked.wait(lock, [&] { return leaving || requests > answered; });
    if (leaving) return;
    const int64_t now = requests;
    lock.unlock();
    settle();
    lock.lock();
    answered = now;
    settled.notify_all();
  }
}

void CollectiveHistory::State::ask(std::unique_lock<std::mutex>& lock) {
  const int64_t own = ++requests;
  asked.notify_one();
  settled.wait_for(lock, kMostWait, [&] { return answered >= own; });
}

CollectiveHistory::CollectiveHistory(size_t keep) : state_(std::make_shared<State>(keep)) {
  std::thread([state = state_] { state->settle_when_asked(); }).detach();
}

CollectiveHistory::~CollectiveHistory() {
  const std::lock_guard lock(state_->mutex);
  state_->leaving = true;
  state_->asked.notify_one();
}

int64_t CollectiveHistory::begin(CollectiveCall call) {
  State& state = *state_;
  int64_t id = 0;
  {
    const std::lock_guard lock(state.mutex);
    id = state.next_id++;
    call.sequence = ++state.issued[call.channel];
    call.started = steady_seconds();
    state.under_way[id].call = std::move(call);
  }
  if (id % kSettleEvery == 0) state.settle();
  return id;
}

void CollectiveHistory::issued(int64_t id, std::shared_ptr<const Progress> progress) {
  const std::lock_guard lock(state_->mutex);
  const auto entry = state_->under_way.find(id);
  if (entry == state_->under_way.end()) return;
  if (progress) {
    entry->second.progress = std::move(progress);
    return;
  }
  state_->finish(entry->second);
  state_->under_way.erase(entry);
}

HistorySnapshot CollectiveHistory::snapshot() {
  std::unique_lock lock(state_->mutex);
  state_->ask(lock);
  HistorySnapshot snapshot;
  snapshot.now = steady_seconds();
  for (const auto& [id, entry] : state_->under_way) snapshot.under_way.push_back(entry.call);
  snapshot.finished.assign(state_->finished.begin(), state_->finished.end());
  snapshot.issued = state_->issued;
  return snapshot;
}

double CollectiveHistory::oldest_age() {
  std::unique_lock lock(state_->mutex);
  state_->ask(lock);
  const auto oldest = state_->under_way.begin();
  return oldest == state_->under_way.end() ? 0 : steady_seconds() - oldest->second.call.started;
}

std::shared_ptr<Backend> record_calls(std::shared_ptr<Backend> world,
                                      std::shared_ptr<CollectiveHistory> history) {
  std::vector<int> members;
  for (int rank = 0; rank < world->size(); ++rank) members.push_back(rank);
  return std::make_shared<RecordedBackend>(std::move(world), std::move(history), "world",
                                           std::move(members), "world");
}

}  // namespace megatron
