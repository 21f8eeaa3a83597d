// Starts the ranks of a job on this machine, for commands that are started by hand.
#pragma once

namespace megatron {

// Starts the program `count` times with the same arguments, as ranks of one job (the variables of
// torchrun). SIGTERM and SIGINT are passed on to them. Returns when all have ended: the first exit
// code that is not 0; of a rank that a signal ended, 128 + the signal.
int run_local_ranks(int count, int argc, char** argv);

}  // namespace megatron
