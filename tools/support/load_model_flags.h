// The flags of commands that load a model from a checkpoint.
#pragma once

#include "megatron/base/fields.h"
#include "megatron/interop/load_model.h"
#include "megatron/runtime/device_choice.h"

namespace megatron {

enum class LoadFormat : uint8_t { kAuto, kDummy };
enum class ModelDType { kStored, kFp32, kBf16, kFp16, kFp64 };

struct LoadModelConfig : Config {
  std::string load;
  std::string adapter;
  std::optional<int64_t> ckpt_step;
  ModelDType dtype = ModelDType::kStored;
  DeviceChoice device = DeviceChoice::kAuto;
  Fp8Format fp8_format = Fp8Format::kNone;
  Fp8Recipe fp8_recipe = Fp8Recipe::kBlockwise;
  bool int8 = false;
  bool batch_invariant_mode = false;
  LoadFormat load_format = LoadFormat::kAuto;  // a flag of commands that serve
  int64_t num_threads = 0;  // 0: OMP_NUM_THREADS, else the rank's share of the cores
  // No flag: what the command says of the model before its weights are read.
  std::function<void(const ModelConfig&, const Tokenizer*)> accept = {};

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

 protected:
  void common_fields(FieldVisitor& visitor);  // all but `adapter`
  void model_fields(FieldVisitor& visitor);   // of these, what says which model and where
};

// The request described by the flags, for the device of this rank. `local_rank`: rank within the
// machine.
LoadModelRequest load_model_request(const LoadModelConfig& config, int local_rank = 0);

// Sets the number of CPU threads, loads the model and logs which checkpoint was loaded. The ranks
// of `agreement` (null: one) verify it together. `groups` must outlive the result.
LoadedModel load_model(const LoadModelConfig& config, const ParallelGroups& groups,
                       bool tokenizer_required = true, int local_rank = 0, int local_ranks = 1,
                       Agreement* agreement = nullptr);

}  // namespace megatron
