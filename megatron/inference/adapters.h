// Low-rank adapters of PEFT folders for requests of one model: each row of a batch takes that of
// its request.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/interop/load_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tensor_parallel/lora_adapter.h"

namespace megatron {

// One adapter: the matrices of the linears that it adapts, on this rank.
class ServedAdapter : public Module {
 public:
  // Reads a PEFT folder for the model of `base`, which has no adapters of its own and must outlive
  // this. Throws Error if the folder does not fit it.
  ServedAdapter(const LoadedModel& base, const std::filesystem::path& folder);

  const RowAdapters::Linears& linears() const { return linears_; }

 private:
  std::vector<std::unique_ptr<LoraAdapter>> adapters_;
  RowAdapters::Linears linears_;
  std::unique_ptr<PlainParameterStore> store_;
};

// The adapters that requests name by index.
using AdapterList = std::vector<std::unique_ptr<ServedAdapter>>;

// Loads (name, folder) pairs, in order.
AdapterList load_adapters(
    const LoadedModel& base,
    const std::vector<std::pair<std::string, std::filesystem::path>>& folders);

}  // namespace megatron
