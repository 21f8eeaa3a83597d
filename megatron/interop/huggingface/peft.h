// Low-rank adapters in the format of PEFT: a folder with adapter_config.json and
// adapter_model.safetensors, read as a checkpoint of our lora_A and lora_B, and written.
//
// An adapter of a module of theirs is one adapter of ours (transformer/config/lora.h) where the module is
// a linear of ours or a part of one. Where one adapter of ours spans several modules of theirs they
// are written with copies of its A; several adapters of ours in one module of theirs have no form
// there.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/interop/huggingface/hf_families.h"

namespace megatron {

inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftSafetensors = "adapter_model.safetensors";

bool is_peft_folder(const std::filesystem::path& folder);

// The adapter's tensors, in the order of ours, for the targets and the rank of the configuration.
// Throws Error when they have no form there.
std::vector<HfTensor> peft_tensors(const HfFamily& family, const GPTConfig& config);

// Reads the folder for a base model of this family and shape, and sets rank, alpha and targets of
// `config` by it: the targets are those that the file holds tensors for. Every tensor is used
// exactly once. Throws Error naming what is missing, left over or of another shape, and settings
// that are not built (DoRA, biases, ranks by pattern, further modules).
Checkpoint open_peft_folder(const std::filesystem::path& folder, const HfFamily& family,
                            GPTConfig& config);

// The text of adapter_config.json over the keys of `base` ("{}": none). A `base` that says the same
// is returned as it is.
std::string write_peft_config(const HfFamily& family, const GPTConfig& config,
                              const std::string& base);

// The family that names the modules of a model: of the folder it came from, as the checkpoint
// keeps it, else the first that can be this model. Throws Error when there is none.
const HfFamily& family_of_model(const Checkpoint& checkpoint, const GPTConfig& config);

// Rows [first, first + count) of the linear whose weight has the name `ours`, with what its adapter
// adds: `rows` [count, k] fp32 or fp64 += scale * B A. `a` and `b` are the whole parameters.
void merge_adapter(const TransformerConfig& config, const std::string& ours, int64_t first,
                   const at::Tensor& a, const at::Tensor& b, const at::Tensor& rows);

}  // namespace megatron
