// Whether a layout fits into the memory of a known GPU model, and what attention dropout costs.
#pragma once

#include <cstdint>
#include <string>

#include "megatron/training/planning/layout_check.h"

namespace megatron {

// "fits an H200: stage 0 needs 48.9 of 140.4 GiB (35%)"
std::string verdict_text(const DeviceVerdict& verdict);

// Rates of the GPU for a run in the precision of the arguments.
MachineSpeeds speeds_of(const DeviceModel& device, const Arguments& arguments);

// Bytes that attention dropout adds to the peak of the fullest stage, because it needs the unfused
// attention; 0 if it is off or attention is unfused without it, too.
int64_t attention_dropout_bytes(const LayoutPlan& plan, const LayoutReport& report);
// A sentence about it; empty below 1% of the peak.
std::string attention_dropout_text(const LayoutPlan& plan, const LayoutReport& report);

}  // namespace megatron
