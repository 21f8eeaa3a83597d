#include "megatron/datasets/retro/rank_share.h"

#include <chrono>
#include <thread>

namespace megatron {

void wait_until(const std::function<bool()>& there) {
  while (!there()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

}  // namespace megatron
