// Exit codes of a program.
#pragma once

namespace megatron {

inline constexpr int kExitFailure = 1;   // the data, the disk, a peer or a device did it
inline constexpr int kExitUsage = 2;     // the command line did it
inline constexpr int kExitInternal = 3;  // a bug of ours

}  // namespace megatron
