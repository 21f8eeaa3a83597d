// The agreement of a job's ranks on checkpoints, over the store.
#pragma once

#include <string>
#include <vector>

#include "megatron/comm/control.h"
#include "megatron/comm/failure_monitor.h"
#include "megatron/dist_checkpointing/agreement.h"

namespace megatron {

// Over the control channel "agreement" of the store: one per rank. Progress is told to the ranks
// that wait in the channel, and to the failure monitor for those that wait in a collective.
class ChannelAgreement final : public Agreement {
 public:
  ChannelAgreement(Store& store, const Launch& launch, double timeout_seconds,
                   FailureMonitor& monitor);
  int rank() const override { return channel_.rank(); }
  int size() const override { return channel_.size(); }
  std::vector<std::string> gather(const std::string& text) override;
  std::string broadcast(const std::string& text) override;
  void progress() override;

 private:
  ControlChannel channel_;
  FailureMonitor& monitor_;
};

}  // namespace megatron
