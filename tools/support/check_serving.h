// `megatron check --serve`: memory of a served model by rank, planned without its weights.
#pragma once

namespace megatron {

// Whether the command line has --serve.
bool asks_for_serving(int argc, const char* const* argv);

// Prints the plan. Returns the exit code: of failure if a named device is too small.
int check_serving(int argc, const char* const* argv);

}  // namespace megatron
