// megatron pretrain: trains a model from the flags of spec and habit; see README.
#include <cstdio>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/tasks/tasks.h"
#include "tools/commands.h"

namespace megatron {

int pretrain_command(int argc, char** argv) {
  Arguments arguments = parse_arguments(argc, argv);
  if (arguments.help) {
    const std::string usage =
        "megatron pretrain --num-layers N --hidden-size N --num-attention-heads N --seq-length N --micro-batch-size N\n"
        "                  --train-iters N --lr X --tokenizer-type T --data-path PREFIX [flags]";
    print_line(help_text(usage, arguments.configs()));
    return 0;
  }
  return pretrain(find_task("gpt"), arguments);
}

}  // namespace megatron
