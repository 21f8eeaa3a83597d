#include "megatron/inference/images/served_media.h"

#include <c10/util/Exception.h>

#include <utility>

#include "megatron/base/check.h"
#include "megatron/serving/api_error.h"

namespace megatron {
namespace {

constexpr char kWhere[] = "the conversation";

ApiError not_now(const std::string& message) {
  ApiError error(503, "messages", message, "unavailable");
  error.retry_after_s = 1;
  return error;
}

}  // namespace

std::string ServedMedia::refusal(MediaKind kind) const {
  if (!reads_media(config_, kind)) return cat("the model reads no ", name_of(kind), "s");
  return why_not_;
}

std::string_view ServedMedia::medium_of(int32_t id) const {
  return megatron::medium_of(config_, id).name;
}

ServedMedia::~ServedMedia() {
  if (weights_ != nullptr) weights_->before_moves({});
}

void ServedMedia::use_graphs() {
  prompts_->use_graphs();
  weights_->before_moves([this] { prompts_->forget_graphs(); });
}

MediaPrompt ServedMedia::prompt(const MultimodalRow& row, bool encode) {
  if (!encode || row.media.empty()) {
    ImagePrompt read = prompts_->ids_of_conversation(row, *chat_, kWhere);
    return {std::move(read.text), std::move(read.ids), nullptr};
  }
  try {
    const ImagePrompt read = prompts_->of_conversation(row, *chat_, kWhere);
    const std::unique_lock<std::mutex> lock = weights_->hold();
    if (!lock.owns_lock()) throw not_now("the weights are suspended: nothing is encoded");
    return {read.text, read.ids, prompts_->start(read, 0, kWhere).rows};
  } catch (const c10::OutOfMemoryError&) {
    throw not_now("the device has no memory left for these images or sounds");
  }
}

}  // namespace megatron
