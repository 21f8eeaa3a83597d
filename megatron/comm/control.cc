#include "megatron/comm/control.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/detail/steady_seconds.h"
#include "megatron/comm/process_group.h"

namespace megatron {

namespace {

// A store of c10d closes the connection of a client whose value has more than 8 MiB, so longer
// texts are several values.
constexpr size_t kPiece = size_t{4} << 20;

size_t pieces_of(const std::string& text) {
  return std::max<size_t>(1, (text.size() + kPiece - 1) / kPiece);
}

std::string key_of_piece(const std::string& key, size_t piece) { return cat(key, "/", piece); }

}  // namespace

ControlChannel::ControlChannel(Store& store, const std::string& name, int rank, int size,
                               double timeout_seconds)
    : store_(store.view("control/" + name)),
      name_(name),
      rank_(rank),
      size_(size),
      timeout_seconds_(timeout_seconds),
      interval_(std::min(1.0, timeout_seconds / 10)),
      longest_pause_(std::clamp(size / 8, 50, 500)) {}

void ControlChannel::progress() {
  const int64_t work = ++work_;
  const double now = steady_seconds();
  double last = told_;
  if (now - last < interval_ || !told_.compare_exchange_strong(last, now)) return;
  store_->set(cat("progress/", rank_), std::to_string(work));
}

// Waits for a key. Polls instead of waiting in the store, whose errors name no rank.
std::string ControlChannel::take(const std::string& key, int from, const char* what,
                                 double patience) {
  const std::string sign = cat("progress/", from);
  std::optional<std::string> seen;
  bool looked = false;
  double last = steady_seconds(), next_look = last;
  double waited = 0;
  for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, longest_pause_)) {
    if (const std::optional<std::string> value = store_->find(key)) return join(key, *value);
    // A pause of this process or of the whole machine is not the other rank's: it counts as one
    // look.
    const double now = steady_seconds();
    waited += std::min(now - last, interval_);
    last = now;
    if (now >= next_look) {
      next_look = now + interval_;
      std::optional<std::string> current = store_->find(sign);
      if (looked && current != seen) {
        waited = 0;
        if (rank_ == 0) progress();  // those who wait for this rank wait for that one
      }
      looked = true;
      seen = std::move(current);
    }
    if (waited > patience)
      throw CollectiveError(cat(what, " ", calls_, " of the channel ", name_, ": rank ", from,
                                " did not arrive and made no progress for ", timeout_seconds_,
                                " s\nhint: it is stuck in a file system or in a loop; see its log"),
                            from);
    std::this_thread::sleep_for(pause);
  }
}

// The key itself comes last: who finds it finds the other pieces.
void ControlChannel::put(const std::string& key, const std::string& text) {
  const size_t pieces = pieces_of(text);
  for (size_t i = 1; i < pieces; ++i)
    store_->set(key_of_piece(key, i), text.substr(i * kPiece, kPiece));
  store_->set(key, cat(pieces, ":", text.substr(0, kPiece)));
}

std::string ControlChannel::join(const std::string& key, const std::string& first) {
  const size_t colon = first.find(':');
  std::string text = first.substr(colon + 1);
  for (size_t i = 1, pieces = std::stoul(first.substr(0, colon)); i < pieces; ++i)
    text += store_->find(key_of_piece(key, i)).value();
  return text;
}

void ControlChannel::erase(const std::string& key, const std::string& text) {
  store_->erase(key);
  for (size_t i = 1; i < pieces_of(text); ++i) store_->erase(key_of_piece(key, i));
}

std::vector<std::string> ControlChannel::gather(const std::string& text) {
  ++calls_;
  const auto key = [&](int rank) { return cat("gather/", calls_, "/", rank); };
  if (rank_ != 0) {
    put(key(rank_), text);
    return {};
  }
  std::vector<std::string> texts = {text};
  for (int rank = 1; rank < size_; ++rank) {
    texts.push_back(take(key(rank), rank, "gather", timeout_seconds_));
    erase(key(rank), texts.back());
  }
  return texts;
}

std::string ControlChannel::broadcast(const std::string& text) {
  ++calls_;
  const std::string key = cat("broadcast/", calls_);
  if (size_ == 1) return text;
  if (rank_ == 0) {
    put(key, text);
    return text;
  }
  // Longer than rank 0's own limit: it may be waiting for another rank, which it should name first.
  const std::string got = take(key, 0, "broadcast", 1.25 * timeout_seconds_ + 3 * interval_);
  // The last reader deletes the keys.
  if (store_->add(key + "/read", 1) == size_ - 1) {
    erase(key, got);
    store_->erase(key + "/read");
  }
  return got;
}

}  // namespace megatron
