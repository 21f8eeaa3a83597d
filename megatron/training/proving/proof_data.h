// Samples of a proof: those of a run's datasets, some of them masked, their documents ending at the
// borders of context ranks.
#pragma once

#include "megatron/datasets/dataset_builder.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// The datasets, of any task, with samples that layouts have gone wrong at. What a sample is follows
// from its index, so that every layout reads the same ones.
//
//   loss weights  of 7 pairs of samples one is wholly masked, one but for its last tokens, one but
//                 for a few inner tokens of its first sample; the others are as they were. By the
//                 declared columns (is_loss_weight).
//   documents     where samples consist of several, most end before, at and behind the chunks'
//                 borders of 2, 3 and 4 context ranks; restarted positions follow.
//   sets          with --multiple-validation-sets two of them; with --full-validation of a size
//                 that fills no last batch.
TrainValidTestDatasets proof_datasets(TrainValidTestDatasets sets, const Arguments& arguments);

}  // namespace megatron
