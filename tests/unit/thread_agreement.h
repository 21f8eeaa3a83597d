// Agreement among ranks that are threads of one process. If a rank throws, the others wait until
// the timeout of the test.
#pragma once

#include <barrier>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/save.h"

namespace megatron {

class ThreadAgreement final : public Agreement {
 public:
  // State shared by the ranks.
  struct Room {
    explicit Room(int size) : barrier(size), texts(static_cast<size_t>(size)) {}
    std::barrier<> barrier;
    std::vector<std::string> texts;
    std::string answer;
  };
  ThreadAgreement(Room& room, int rank) : room_(room), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(room_.texts.size()); }
  std::vector<std::string> gather(const std::string& text) override {
    room_.texts[static_cast<size_t>(rank_)] = text;
    room_.barrier.arrive_and_wait();
    std::vector<std::string> all = rank_ == 0 ? room_.texts : std::vector<std::string>();
    room_.barrier.arrive_and_wait();
    return all;
  }
  std::string broadcast(const std::string& text) override {
    if (rank_ == 0) room_.answer = text;
    room_.barrier.arrive_and_wait();
    std::string answer = room_.answer;
    room_.barrier.arrive_and_wait();
    return answer;
  }

 private:
  Room& room_;
  int rank_;
};

}  // namespace megatron
