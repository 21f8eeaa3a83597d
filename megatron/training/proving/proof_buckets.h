// Gradient buckets of the tiny model on which `prove` compares ranks with one rank.
#pragma once

#include "megatron/training/arguments/arguments.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {

// Chooses --ddp-bucket-size of `tiny`, so that each of its model chunks has as many buckets as that
// of `model`, up to 3: the first, one between others, the last. Both are valid and have the same
// stages and chunks. Counts parameters without allocating them; a vocabulary size that the flags do
// not give is taken for 32000.
void shrink_buckets(const Arguments& model, Arguments& tiny, Shrinker& shrinker);

}  // namespace megatron
