#include "megatron/dist_checkpointing/agreement.h"

#include <algorithm>
#include <exception>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"

namespace megatron {
namespace {

constexpr size_t kShown = 8;  // ranks whose messages are shown

// The message after a prefix: "~" if a restart may succeed, else "-".
std::string tagged(const std::exception& error) {
  const bool retry = failure_class(error) == FailureClass::kRetry;
  return cat(retry ? "~" : "-", error.what()[0] != '\0' ? error.what() : "unknown failure");
}

[[noreturn]] void throw_tagged(const std::string& text) {
  if (text[0] == '~') throw RetryError(text.substr(1));
  throw Error(text.substr(1));
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
      answer = tagged(error);
    }
    ranks.broadcast(answer);
    if (failure) std::rethrow_exception(failure);
    return answer.substr(1);
  }
  answer = ranks.broadcast("");
  MEGATRON_CHECK(!answer.empty(), "rank 0 gave no answer");
  if (answer[0] != '+') throw_tagged(answer);
  return answer.substr(1);
}

void work_together(Agreement& ranks, const std::function<void()>& work) {
  std::string own;
  std::exception_ptr failure;
  try {
    work();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    own = tagged(error);
  }
  const std::vector<std::string> all = ranks.gather(own);
  const std::string together = ranks.broadcast([&]() -> std::string {
    std::string text;
    size_t failed = 0;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].empty() || ++failed > kShown) continue;
      const std::string who = all.size() > 1 ? cat("rank ", rank, ": ") : std::string();
      const std::string message = all[rank].substr(1);
      // The first rank's message is shown in full and decides whether to retry, followed by the
      // first lines of the others.
      text += text.empty() ? all[rank][0] + who + message
                           : "\ndetail: " + who + message.substr(0, message.find('\n'));
    }
    if (failed > kShown) text += cat("\ndetail: and ", failed - kShown, " more ranks");
    return text;
  }());
  if (together.empty()) return;
  if (failure && ranks.size() == 1) std::rethrow_exception(failure);
  throw_tagged(together);
}

}  // namespace megatron
