#include "megatron/inference/adapters.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

constexpr std::string_view kWeight = "weight";

}  // namespace

ServedAdapter::ServedAdapter(const LoadedModel& base, const std::filesystem::path& folder) {
  Model& model = *base.model;
  const ParallelGroups& groups = model.groups();
  MEGATRON_CHECK(model.sequence_input() == SequenceInputUse::kNone, folder.string(),
                 ": adapters of requests are not built for models that read an input of each "
                 "sequence\nhint: merge the adapter, megatron convert-checkpoint");
  MEGATRON_CHECK(model.config().transformer.lora_rank == 0, folder.string(), ": ",
                 base.directory.string(), " holds adapters already");
  ModelConfig config = model.config();
  const Checkpoint checkpoint = open_peft_folder(folder, base.family(), config);
  const auto& stored = checkpoint.manifest().tensors;
  std::vector<std::string> names;  // of A and B in turn
  model.visit([&](const std::string& name, Parameter& weight) {
    if (!name.ends_with(kWeight)) return;
    const std::string stem = name.substr(0, name.size() - kWeight.size());
    if (!stored.contains(stem + std::string(kLoraA))) return;
    MEGATRON_CHECK(!stem.ends_with("linear_kv_up_proj."), folder.string(), ": ", name,
                   ": adapters of rows on the keys and values of latent attention are not built: "
                   "cached latents meet one weight for all rows\nhint: merge the adapter, megatron "
                   "convert-checkpoint");
    MEGATRON_CHECK(config.type != "mimo" || name.starts_with("language_model."), folder.string(),
                   ": ", name,
                   ": adapters of requests are of the language model, media are encoded without\n"
                   "hint: merge the adapter, megatron convert-checkpoint");
    const LoraOptions options = adapter_options(config, name);
    LoraAdapter& adapter =
        *adapters_.emplace_back(std::make_unique<LoraAdapter>(weight, options, groups));
    add(stem + std::string(kLoraA), &adapter.a);
    add(stem + std::string(kLoraB), &adapter.b);
    linears_[&weight] = &adapter;
  });
  name_parameters();
  const at::Device device = base.store->device();
  store_ = std::make_unique<PlainParameterStore>(*this, base.dtype, at::kCPU, /*gradients=*/false);
  std::vector<ShardedTensor> wanted;
  visit([&](const std::string& name, Parameter& parameter) {
    wanted.push_back(sharded_tensor(parameter, groups, name, parameter.value));
  });
  LoadOptions options;
  options.convert_dtype = true;
  if (groups.pp.size() > 1) options.wanted_elsewhere = {"*"};
  checkpoint.load(wanted, options);
  visit([&](const std::string&, Parameter& parameter) {
    parameter.value = parameter.value.to(device);
  });
}

AdapterList load_adapters(
    const LoadedModel& base,
    const std::vector<std::pair<std::string, std::filesystem::path>>& folders) {
  AdapterList adapters;
  for (const auto& [name, folder] : folders) {
    try {
      adapters.push_back(std::make_unique<ServedAdapter>(base, folder));
    } catch (const Error& error) {
      throw_error(cat("adapter ", name, ": ", error.what()));
    }
  }
  return adapters;
}

}  // namespace megatron
