// Matrices of an optimizer shard as an update rule that needs them whole sees them.
#pragma once

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

// The matrix of a parameter whose local part is all of `flat`. If tensor ranks divide it, gradient,
// master weights and states are gathered, [global_shape] each; otherwise they are views.
// Communication: an all-reduce over groups.tp for each of the gathered tensors.
MatrixUpdate whole_matrix(const FlatUpdate& flat, const Parameter& parameter,
                          const ParallelGroups& groups);

// Writes this rank's part of master weights and states back, and the values from the master weights
// if these are kept beside them. The counterpart of whole_matrix(); no communication.
void store_matrix(const MatrixUpdate& matrix, FlatUpdate& flat, const Parameter& parameter,
                  const ParallelGroups& groups);

}  // namespace megatron
