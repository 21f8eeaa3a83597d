#include "megatron/runtime/channel_agreement.h"

namespace megatron {

ChannelAgreement::ChannelAgreement(Store& store, const Launch& launch, double timeout_seconds,
                                   FailureMonitor& monitor)
    : channel_(store, "agreement", launch.rank, launch.world_size, timeout_seconds),
      monitor_(monitor) {}

std::vector<std::string> ChannelAgreement::gather(const std::string& text) {
  return channel_.gather(text);
}

std::string ChannelAgreement::broadcast(const std::string& text) {
  return channel_.broadcast(text);
}

void ChannelAgreement::progress() {
  channel_.progress();
  monitor_.progress();
}

}  // namespace megatron
