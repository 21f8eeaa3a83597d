// How the ranks that save or load one checkpoint coordinate.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace megatron {

// gather and broadcast are collective; an implementation has a deadline, counted from the last
// progress report of the rank that is waited for, and throws when it has passed. It must not use a
// training communicator. The default is for one rank.
class Agreement {
 public:
  virtual ~Agreement() = default;
  virtual int rank() const { return 0; }
  virtual int size() const { return 1; }
  // Rank 0 gets the texts of all ranks in order; the others get an empty list.
  virtual std::vector<std::string> gather(const std::string& text) { return {text}; }
  // Every rank gets rank 0's text.
  virtual std::string broadcast(const std::string& text) { return text; }
  // This rank has read, written or removed something: ranks that wait for it keep waiting. Called
  // about once per block of 1 MiB, from any thread; cheap.
  virtual void progress() {}
};

// Rank 0 decides; every rank gets the text, or throws Error with the message that rank 0 threw.
// Collective.
std::string decide_together(Agreement& ranks, const std::function<std::string()>& decide);

// Every rank runs `work`; returns when all have. If any rank throws, every rank throws Error with
// the messages of those that did. Collective.
void work_together(Agreement& ranks, const std::function<void()>& work);

}  // namespace megatron
