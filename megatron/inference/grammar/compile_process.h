// A process that gets some bytes, gives some bytes, and is ended at a deadline.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace megatron {

struct ProcessResult {
  enum class End : uint8_t {
    kExited,    // with `status`
    kKilled,    // by the signal `status`: of its own, or the system's
    kDeadline,  // was ended
    kTooMuch,   // wrote more than it may, was ended
  };
  End end = End::kExited;
  int status = 0;
  std::string output;
};

// Runs a program with no arguments, no environment and no open files but the three standard ones;
// its errors go nowhere. Throws RetryError if it cannot be started.
ProcessResult run_bounded_process(const std::filesystem::path& program, const std::string& input,
                                  int64_t deadline_ms, int64_t most_output_bytes);

}  // namespace megatron
