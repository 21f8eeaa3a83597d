// Reads the goldens of tests/golden/gpt and builds tiny models from them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "megatron/models/gpt/gpt_model.h"

namespace megatron {

struct Golden {
  ModelConfig config;
  std::map<std::string, at::Tensor> tensors;  // by name in the file
};

// Reads <folder>/<name>.safetensors; the goldens of this repository by default.
Golden read_golden(const std::string& name,
                   const std::string& folder = MEGATRON_SOURCE_DIR "/tests/golden/gpt");

// Copies tensors "<prefix><parameter name>" into the values of `model`; every parameter must be
// present with its shape (vocabulary padding stays zero).
void load_weights(Module& model, const Golden& golden, const std::string& prefix);

// The context for [b, s] tokens whose first sample has index `first_sample`.
ForwardContext context_for(const at::Tensor& tokens, bool training, int64_t first_sample = 0);

// The mean cross entropy of the first layer of multi-token prediction over tokens [1, s].
double mtp_loss(Model& model, const at::Tensor& tokens);

// Expects ||a - b|| <= rtol ||b|| + 1e-3 rtol ||all||, as compare_traces()
// (training/equivalence.h).
void expect_close(const at::Tensor& actual, const at::Tensor& expected, double rtol,
                  double norm_of_all, const std::string& what);

}  // namespace megatron
