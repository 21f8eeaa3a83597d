// Texts of all ranks of a group, by its collectives: for what is reported now and then.
#pragma once

#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// The texts of all ranks, in rank order, on every rank. `device`: where the group's collectives
// have their tensors. Waits for the device. Communication: an all-reduce of one number, and an
// all-gather of as many bytes as the longest text has.
std::vector<std::string> gather_texts(const ProcessGroup& group, at::Device device,
                                      const std::string& text);

}  // namespace megatron
