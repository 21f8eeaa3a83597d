// A group that knows its rank and size and cannot communicate: models are built over such groups to
// be planned, for any rank of any number of ranks, by one process.
#pragma once

#include <memory>

#include "megatron/comm/process_group.h"

namespace megatron {

// Rank `rank` of `size`. Subgroups are described, too; every collective, message and barrier throws
// InternalError.
std::shared_ptr<Backend> described_backend(int rank, int size);

}  // namespace megatron
