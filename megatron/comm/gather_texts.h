// Gathers a text from every rank of a group through its collectives, for occasional reports.
#pragma once

#include <string>
#include <vector>

#include "megatron/comm/process_group.h"

namespace megatron {

// Returns the texts of all ranks, in rank order, on every rank. `device`: where the group's
// collectives have their tensors. Synchronises with the device. Communication: an all-reduce of one
// number, and an all-gather in which each rank sends as many bytes as the longest text has.
std::vector<std::string> gather_texts(const ProcessGroup& group, at::Device device,
                                      const std::string& text);

}  // namespace megatron
