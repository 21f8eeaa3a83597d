// Matrices of an optimizer shard as an update rule that needs them whole sees them.
#pragma once

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

// The matrix of a slot that holds a whole local parameter. If tensor ranks divide the parameter,
// gradient, master weights and states are gathered, [global_shape] each; otherwise they are views.
// Communication: an all-reduce over groups.tp for each of the gathered tensors.
MatrixUpdate whole_matrix(const FlatUpdate& flat, const FlatSlot& slot,
                          const ParallelGroups& groups);

// Writes this rank's part of master weights and states back, and the values from the master weights
// if these are kept beside them. The counterpart of whole_matrix(); no communication.
void store_matrix(const MatrixUpdate& matrix, FlatUpdate& flat, const FlatSlot& slot,
                  const ParallelGroups& groups);

}  // namespace megatron
