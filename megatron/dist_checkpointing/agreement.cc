#include "megatron/dist_checkpointing/agreement.h"

#include <algorithm>
#include <exception>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr size_t kShown = 8;  // ranks whose messages are shown

std::string message_of(const std::exception& error) {
  return error.what()[0] != '\0' ? error.what() : "unknown failure";
}

}  // namespace

std::string decide_together(Agreement& ranks, const std::function<std::string()>& decide) {
  std::string answer;
  if (ranks.rank() == 0) {
    std::exception_ptr failure;
    try {
      answer = "+" + decide();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      answer = "-" + message_of(error);
    }
    ranks.broadcast(answer);
    if (failure) std::rethrow_exception(failure);
    return answer.substr(1);
  }
  answer = ranks.broadcast("");
  MEGATRON_CHECK(!answer.empty() && answer[0] == '+', answer.empty() ? "rank 0 gave no answer" : answer.substr(1));
  return answer.substr(1);
}

void work_together(Agreement& ranks, const std::function<void()>& work) {
  std::string own;
  std::exception_ptr failure;
  try {
    work();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    own = message_of(error);
  }
  const std::vector<std::string> all = ranks.gather(own);
  const std::string together = ranks.broadcast([&]() -> std::string {
    std::string text;
    size_t failed = 0;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty() || ++failed > kShown) continue;
      const std::string who = all.size() > 1 ? cat("rank ", rank, ": ") : std::string();
      // One rank's message is shown whole, the first lines of the others below it.
      text += text.empty() ? who + all[rank] : "\ndetail: " + who + all[rank].substr(0, all[rank].find('\n'));
    }
    if (failed > kShown) text += cat("\ndetail: and ", failed - kShown, " more ranks");
    return text;
  }());
  if (together.empty()) return;
  if (failure && ranks.size() == 1) std::rethrow_exception(failure);
  throw Error(together);
}

}  // namespace megatron
