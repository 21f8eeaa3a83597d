// Looks whether a store of c10d answers at an address, which c10d itself would wait for without a
// limit once something listens.
#pragma once

#include <string>

namespace megatron {

// Returns when it answers; tries again, with growing pauses, while nothing listens. Throws
// RetryError that says what is there instead, at the deadline, or at once when what listens answers
// something else.
void wait_for_store(const std::string& host, int port, double timeout_seconds);

}  // namespace megatron
