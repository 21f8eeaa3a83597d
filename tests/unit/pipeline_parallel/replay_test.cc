#include <gtest/gtest.h>

#include <iostream>

#include "megatron/pipeline_parallel/draw.h"
#include "megatron/pipeline_parallel/replay.h"
#include "testing.h"

namespace megatron {
namespace {
TEST(Explore, Print) {
  for (auto [p, v, m] : {std::tuple{4, 1, 8}, {4, 2, 8}, {2, 2, 4}, {4, 2, 3}, {4,1,2}}) {
    for (ScheduleKind kind : kAllKinds) {
      if ((kind == ScheduleKind::kZeroBubbleV) && v != 2) continue;
      try {
      const Schedule s = make_schedule(kind, shape_of(p, v, m));
      const Replay r = replay(s);
      std::cout << draw_text(s, r, 3 * v * static_cast<int>(r.makespan + 0.5)) << "makespan " << r.makespan << "\n";
      for (auto& l : s.stages) std::cout << to_string(l) << "\n";
      } catch (const std::exception& e) { std::cout << e.what() << "\n"; }
    }
  }
}
}  // namespace
}  // namespace megatron
