// The commands of the binary. Each takes argv with argv[0] the command's name and returns the exit code; errors are thrown.
#pragma once

namespace megatron {

int pretrain_command(int argc, char** argv);
int finetune_command(int argc, char** argv);
int preprocess_data(int argc, char** argv);
int train_tokenizer(int argc, char** argv);
int merge_datasets(int argc, char** argv);
int inspect_dataset(int argc, char** argv);
int inspect_chat(int argc, char** argv);
int check_command(int argc, char** argv);
int prove_command(int argc, char** argv);
int generate(int argc, char** argv);
int logits(int argc, char** argv);
int convert_checkpoint(int argc, char** argv);
int inspect_checkpoint(int argc, char** argv);
int report(int argc, char** argv);
int bench(int argc, char** argv);
int version(int argc, char** argv);

}  // namespace megatron
