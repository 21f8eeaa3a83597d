// Probes whether a c10d store answers at an address. c10d itself would wait without limit as soon
// as any server listens there.
#pragma once

#include <string>

namespace megatron {

// Returns when the store answers; retries with growing pauses while nothing listens. Throws
// RetryError that says what was found instead: at the deadline, or at once if a server of another
// kind answers.
void wait_for_store(const std::string& host, int port, double timeout_seconds);

}  // namespace megatron
