// Batch-invariant mode: the bits of a row of a result depend on that row's inputs alone, not on the
// rows beside it. A token then has the same logits in a step of the server, whatever shares its
// batch, and in the forward that trains.
//
// Source: He 2025, "Defeating Nondeterminism in LLM Inference".
#pragma once

namespace megatron {

inline constexpr char kBatchInvariantHelp[] =
    "the bits of a token's logits do not depend on what shares its batch, and are the same when "
    "it is served and when it is trained on; fp32 and fp64 on CPUs, bf16 and fp16 on Hopper GPUs";

// From now on, forward products and attention of this process are batch-invariant; the other
// operations always are. Off by default. Operations without such a form throw Error.
void set_batch_invariant(bool on);
bool is_batch_invariant();

}  // namespace megatron
