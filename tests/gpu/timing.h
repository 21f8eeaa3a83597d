// Times of work on a GPU.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "megatron/tensor/torch.h"

namespace megatron {

// Milliseconds of each work, measured in turns: the clock of a machine changes with its load. An
// element of `on`, which is on the GPU, is read to wait for it.
inline std::vector<double> milliseconds(const at::Tensor& on,
                                        const std::vector<std::function<void()>>& works) {
  constexpr size_t kRounds = 5, kRuns = 10;
  std::vector<std::vector<double>> times(works.size());
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t turn = 0; turn < works.size(); ++turn) {
      const size_t i = (turn + round) % works.size();
      works[i]();
      on.view(-1)[0].item();
      const auto begin = std::chrono::steady_clock::now();
      for (size_t run = 0; run < kRuns; ++run) works[i]();
      on.view(-1)[0].item();
      const std::chrono::duration<double, std::milli> time =
          std::chrono::steady_clock::now() - begin;
      times[i].push_back(time.count() / kRuns);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& each : times) {
    std::sort(each.begin(), each.end());
    medians.push_back(each[kRounds / 2]);
  }
  return medians;
}

}  // namespace megatron
