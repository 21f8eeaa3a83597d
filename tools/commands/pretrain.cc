// megatron pretrain: trains a model; see README.
#include "tools/support/training_run.h"

namespace megatron {

extern "C" int megatron_pretrain(int argc, char** argv) {
  return run_training(
      argc, argv, parse_arguments,
      "megatron pretrain --num-layers N --hidden-size N --num-attention-heads N --seq-length N "
      "--micro-batch-size N\n"
      "                  --train-iters N --lr X --tokenizer-type T --data-path PREFIX [flags]\n\n");
}

}  // namespace megatron
