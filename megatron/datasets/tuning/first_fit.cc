#include "megatron/datasets/tuning/first_fit.h"

namespace megatron {
namespace {

constexpr size_t kOpenSequences = 64;

struct OpenSequence {
  std::vector<int64_t> members;
  SequenceLoad room;
};

}  // namespace

void PackedSequences::pack(std::span<const int64_t> samples,
                           const std::function<SequenceLoad(int64_t)>& load, SequenceLoad room) {
  std::vector<OpenSequence> open;  // oldest first
  const auto give_out = [&](size_t k) {
    members_.insert(members_.end(), open[k].members.begin(), open[k].members.end());
    ends_.push_back(std::ssize(members_));
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(k));
  };
  for (const int64_t sample : samples) {
    const SequenceLoad taken = load(sample);
    size_t k = 0;
    while (k < open.size() && (open[k].room[0] < taken[0] || open[k].room[1] < taken[1])) ++k;
    if (k == open.size()) {
      if (open.size() == kOpenSequences) give_out(0), --k;
      open.push_back({{}, room});
    }
    open[k].members.push_back(sample);
    for (size_t i = 0; i < taken.size(); ++i) open[k].room[i] -= taken[i];
    if (open[k].room[0] == 0) give_out(k);
  }
  while (!open.empty()) give_out(0);
}

int64_t PackedSequences::size() const { return std::ssize(ends_); }

std::span<const int64_t> PackedSequences::operator[](int64_t sequence) const {
  const auto i = static_cast<size_t>(sequence);
  const int64_t begin = i == 0 ? 0 : ends_[i - 1];
  return std::span(members_).subspan(static_cast<size_t>(begin),
                                     static_cast<size_t>(ends_[i] - begin));
}

}  // namespace megatron
