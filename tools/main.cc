// The table of commands. computing<NAME> is a function of libmegatron_compute.so, by its name: one
// file in tools/commands/ each, too.
#include "tools/support/command_line.h"
#include "tools/support/compute_library.h"

namespace megatron {

// Commands without libtorch, which are part of the program: one file each in tools/commands/.
int inspect_chat(int argc, char** argv);
int inspect_checkpoint(int argc, char** argv);
int inspect_dataset(int argc, char** argv);
int merge_datasets(int argc, char** argv);
int preprocess_data(int argc, char** argv);
int report(int argc, char** argv);
int tokenize(int argc, char** argv);
int train_tokenizer(int argc, char** argv);
int version(int argc, char** argv);

}  // namespace megatron

int main(int argc, char** argv) {
  using namespace megatron;  // NOLINT: the table reads better
  static constexpr Command kCommands[] = {
      {"preprocess-data", preprocess_data, "turn text into a dataset of token ids"},
      {"train-tokenizer", train_tokenizer, "learn a byte-level BPE tokenizer from text"},
      {"tokenize", tokenize, "show the tokens of a text"},
      {"merge-datasets", merge_datasets, "join datasets into one"},
      {"inspect-dataset", inspect_dataset,
       "show the header, the counts or one sample of a dataset"},
      {"inspect-chat", inspect_chat,
       "show a rendered conversation, and which of its tokens are in the loss"},
      {"pretrain", computing<"megatron_pretrain">,
       "train a model, with evaluation and checkpoints"},
      {"finetune", computing<"megatron_finetune">,
       "fine-tune a model on conversations or preferences"},
      {"check", computing<"megatron_check">,
       "check a configuration on a number of ranks, and estimate what it needs"},
      {"prove", computing<"megatron_prove">,
       "check that a layout of ranks computes what one rank computes"},
      {"serve", computing<"megatron_serve">,
       "serve a model over HTTP: the OpenAI API and a chat page"},
      {"chat", computing<"megatron_chat">, "talk with a model in the terminal"},
      {"generate", computing<"megatron_generate">, "generate text with a trained model"},
      {"logits", computing<"megatron_logits">, "write the logits of given token ids"},
      {"classify", computing<"megatron_classify">,
       "tell classes of texts, or answer questions, by an encoder"},
      {"seq2seq", computing<"megatron_seq2seq">,
       "write texts with an encoder-decoder, and compare them with those of a file"},
      {"embed", computing<"megatron_embed">, "write vectors of texts by an encoder"},
      {"retro", computing<"megatron_retro">,
       "make a database of text, and find the neighbours of training samples in it"},
      {"evaluate", computing<"megatron_evaluate">,
       "measure a model on text files and multiple-choice questions"},
      {"convert-checkpoint", computing<"megatron_convert_checkpoint">,
       "turn Hugging Face models into checkpoints, and back"},
      {"inspect-checkpoint", inspect_checkpoint, "show and verify what a checkpoint holds"},
      {"report", report, "make a page of curves from the folder of a run"},
      {"bench", computing<"megatron_bench">, "measure kernels and steps on this machine"},
      {"version", version, "show the version of this program and of every library in it"},
  };
  return run_command_line(kCommands, argc, argv);
}
