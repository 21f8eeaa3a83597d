// Drawings of a replayed schedule. Without libtorch.
#pragma once

#include <string>

#include "megatron/pipeline_parallel/replay.h"

namespace megatron {

// One line per stage, for a terminal: each pass as its letter and micro-batch ("F3", with ' for the
// second chunk, " for the third ...), as many columns wide as it takes time, dots where the stage
// waits; at the end of the line the stage's peak of held activations. `columns`: width of the
// longest line of passes.
std::string draw_text(const Schedule& schedule, const Replay& replay, int columns = 160);

// A self-contained SVG: one row per stage, colour by kind of pass, shade by chunk, micro-batch
// numbers where they fit, hatched bubbles, a legend. Can stand inside an HTML page.
std::string draw_svg(const Schedule& schedule, const Replay& replay, double width = 1200);

}  // namespace megatron
