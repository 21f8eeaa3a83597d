// The commands of the program. Each takes argv with argv[0] the command's name and returns the exit
// code; errors are thrown.
#pragma once

namespace megatron {

// Without libtorch: in the program itself.
int preprocess_data(int argc, char** argv);
int train_tokenizer(int argc, char** argv);
int tokenize(int argc, char** argv);
int merge_datasets(int argc, char** argv);
int inspect_dataset(int argc, char** argv);
int inspect_chat(int argc, char** argv);
int inspect_checkpoint(int argc, char** argv);
int report(int argc, char** argv);
int version(int argc, char** argv);

// With libtorch: in libmegatron_compute.so, where the table of commands finds them by name
// (tools/support/compute_library.h).
extern "C" {
int megatron_pretrain(int argc, char** argv);
int megatron_finetune(int argc, char** argv);
int megatron_check(int argc, char** argv);
int megatron_prove(int argc, char** argv);
int megatron_generate(int argc, char** argv);
int megatron_logits(int argc, char** argv);
int megatron_evaluate(int argc, char** argv);
int megatron_convert_checkpoint(int argc, char** argv);
int megatron_bench(int argc, char** argv);
}

}  // namespace megatron
