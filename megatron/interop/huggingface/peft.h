// Low-rank adapters in PEFT's format: a folder with adapter_config.json and
// adapter_model.safetensors, read as a checkpoint of our lora_A and lora_B, and written.
//
// If a Hugging Face module is one of our linears or a part of one, its adapter is one adapter of
// ours (transformer/config/lora.h). If one of our adapters spans several Hugging Face modules, each
// is written with a copy of its A; several of our adapters in one Hugging Face module cannot be
// expressed.
//
// Of a model that reads media names are those of the modules of transformers 5. Adapters of layers
// of an encoder behind those that the model has are left out.
//
// What else such a model trains, the pooler and the head of classes of an encoder, is in the file
// under the names of the base model; modules_to_save says so.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/interop/huggingface/hf_families.h"

namespace megatron {

inline constexpr const char* kPeftConfig = "adapter_config.json";
inline constexpr const char* kPeftSafetensors = "adapter_model.safetensors";

bool is_peft_folder(const std::filesystem::path& folder);

// The adapter's tensors, in our model order, for the targets and the rank of the configuration;
// then those of heads. Throws Error if PEFT's format cannot express them.
std::vector<HfTensor> peft_tensors(const HfFamily& family, const ModelConfig& config);
// Takes from `tensors` those of heads that the text of an adapter_config.json does not list in
// modules_to_save.
void keep_modules_to_save(const HfFamily& family, const std::string& json,
                          std::vector<HfTensor>& tensors);

// Opens the folder for a base model of this family and shape, and sets rank, alpha and targets of
// `config`: the targets are those that the file holds tensors for. An encoder without classes gets
// those of a head that the file holds, in the place of the heads of pretraining. Every tensor is
// used exactly once. Throws Error naming tensors that are missing, left over or of another shape,
// and settings that are not built (DoRA, biases, ranks by pattern, further modules but heads).
Checkpoint open_peft_folder(const std::filesystem::path& folder, const HfFamily& family,
                            ModelConfig& config);

// The parameters of `base` in whose place `adapted`, the same model with adapters, has a head.
std::set<std::string> replaced_parameters(const ModelConfig& base, const ModelConfig& adapted);

// The adapters of the linear whose weight is named `weight`. A shared expert has its own width.
LoraOptions adapter_options(const ModelConfig& config, std::string_view weight);

// The text of adapter_config.json; keys of `base` ("{}": none) that are not set here are kept. A
// `base` with the same content is returned unchanged.
std::string write_peft_config(const HfFamily& family, const ModelConfig& config,
                              const std::string& base);

// The family whose module names apply: that of the Hugging Face folder that the model was imported
// from, which the checkpoint records, else the first that can express the model. Throws Error if
// there is none.
const HfFamily& family_of_model(const Checkpoint& checkpoint, const ModelConfig& config);

// Merges an adapter into rows [first, first + count) of the linear whose weight is named `ours`:
// `rows` [count, k] fp32 or fp64 += scale * B A. `a` and `b` are the whole parameters.
void merge_adapter(const ModelConfig& config, const std::string& ours, int64_t first,
                   const at::Tensor& a, const at::Tensor& b, const at::Tensor& rows);

}  // namespace megatron
