#include "megatron/datasets/tuning/first_fit.h"

namespace megatron {
namespace {

constexpr size_t kOpenSequences = 64;

struct OpenSequence {
  std::vector<int64_t> members;
  SequenceLoad room;
};

}  // namespace

void pack_first_fit(std::span<const int64_t> samples,
                    const std::function<SequenceLoad(int64_t)>& load, SequenceLoad room,
                    std::vector<int64_t>& members, std::vector<int64_t>& ends) {
  std::vector<OpenSequence> open;  // oldest first
  const auto give_out = [&](size_t k) {
    members.insert(members.end(), open[k].members.begin(), open[k].members.end());
    ends.push_back(static_cast<int64_t>(members.size()));
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

}  // namespace megatron
