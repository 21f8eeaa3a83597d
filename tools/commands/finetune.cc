// megatron finetune: fine-tunes a model on conversations, preferences, classes of texts,
// multiple-choice questions or pairs of texts; see docs/fine_tuning.md and docs/encoders.md.
#include "tools/support/training_run.h"

namespace megatron {

extern "C" int megatron_finetune(int argc, char** argv) {
  return run_training(
      argc, argv, parse_finetune_arguments,
      "megatron finetune --load MODEL --train-data-path CONVERSATIONS --seq-length N "
      "--micro-batch-size N\n"
      "                  --train-iters N --lr X [--task sft|dpo|classify|multichoice|seq2seq]\n"
      "                  [--save FOLDER] [flags of pretrain]\n\n"
      "MODEL is a folder of checkpoints or of Hugging Face; its model and tokenizer are used "
      "unless "
      "flags say otherwise.\n"
      "When --save holds checkpoints of this run already, it goes on from there.\n\n");
}

}  // namespace megatron
