#include "megatron/interop/huggingface/peft.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/moe/moe_layer.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::string_view kPrefix = "base_model.model.";
constexpr std::string_view kWeight = ".weight";

// Settings that change what an adapter computes or add other weights; refused unless null, false or
// empty.
constexpr const char* kNotBuilt[] = {"use_dora",          "use_qalora",
                                     "use_bdlora",        "lora_bias",
                                     "rank_pattern",      "alpha_pattern",
                                     "layer_replication", "trainable_token_indices",
                                     "target_parameters", "alora_invocation_tokens",
                                     "arrow_config",      "kasa_config",
                                     "monteclora_config", "velora_config"};

bool is_off(const ordered_json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         ((value.is_array() || value.is_object() || value.is_string()) && value.empty());
}

// "vision_model." of a parameter of that module; empty: it is of the language model.
std::string_view module_of(std::string_view ours) {
  for (const std::string_view module :
       {"vision_model.", "vision_projection.", "audio_model.", "audio_projection."})
    if (ours.starts_with(module)) return module;
  return {};
}

// "linear_qkv" of "decoder.layers.3.self_attention.linear_qkv.weight", for linears that can have
// adapters; else empty.
std::string_view linear_of(std::string_view weight) {
  const std::string_view module = module_of(weight);
  weight.remove_prefix(module.size());
  if (module.ends_with("_projection."))
    return weight == "encoder.linear_fc2.weight"                                 ? "linear_fc2"
           : weight == "encoder.linear_fc1.weight" || weight == "encoder.weight" ? "linear_fc1"
                                                                                 : "";
  constexpr std::string_view kLanguageModel = "language_model.";
  if (weight.starts_with(kLanguageModel)) weight.remove_prefix(kLanguageModel.size());
  if ((!weight.starts_with("decoder.layers.") && !weight.starts_with("encoder.layers.")) ||
      !weight.ends_with(kWeight))
    return {};
  weight.remove_suffix(kWeight.size());
  const std::string_view name = weight.substr(weight.rfind('.') + 1);
  for (const std::string_view linear :
       {"linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "linear_q_down_proj",
        "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1",
        "linear_fc2", "in_proj", "out_proj"})
    if (name == linear) return linear;
  return {};
}

// The --lora-targets name of a Hugging Face module.
std::string part_name(std::string_view linear, size_t part, size_t parts) {
  if (parts == 1 || linear == "in_proj") return std::string(linear);
  if (linear == "linear_qkv") return std::array{"linear_q", "linear_k", "linear_v"}.at(part);
  if (linear == "linear_kv") return std::array{"linear_k", "linear_v"}.at(part);
  return std::array{"linear_fc1_gate", "linear_fc1_up"}.at(part);
}

// For each row of a linear its row in lora_B; -1: not adapted.
std::vector<int64_t> rows_in_b(const LoraOptions& options, int64_t rows) {
  std::vector<int64_t> out(static_cast<size_t>(rows), -1);
  int64_t next = 0;
  for (size_t row = 0; row < out.size(); ++row)
    if (options.adapter_of_row.empty() || options.adapter_of_row[row] >= 0) out[row] = next++;
  return out;
}

// A Hugging Face module that may have an adapter: its weight, and which part of our linear it is.
struct AdaptableModule {
  HfTensor weight;
  std::string linear;
  size_t part = 0, parts = 1;
  std::string name() const { return weight.name.substr(0, weight.name.size() - kWeight.size()); }
  std::string part_target() const { return part_name(linear, part, parts); }
  // As --lora-targets names it
  std::string target() const { return cat(module_of(weight.ours), part_target()); }
};

// The configuration of the module that a parameter of ours belongs to.
TransformerConfig part_config(const ModelConfig& config, std::string_view ours) {
  const auto* own = config.own.as<MimoConfig>();
  return own == nullptr ? config.transformer : own->part(config.transformer, ours);
}

// The tensors of the base model by the names of its modules, of which those of families with
// several beginnings are the last.
std::vector<HfTensor> module_tensors(const HfFamily& family, const ModelConfig& base) {
  std::vector<HfTensor> tensors = hf_tensors(family, base);
  for (HfTensor& tensor : tensors) {
    std::string_view module, beginning;
    for (const auto& [there, here] : family.beginnings)
      if (tensor.name.starts_with(here)) module = there, beginning = here;
    tensor.name.replace(0, beginning.size(), module);
  }
  return tensors;
}

ModelConfig base_of(const ModelConfig& config) {
  ModelConfig base = config;
  base.transformer.lora_rank = 0;
  return base;
}

// The tensors of the base model that a model with adapters trains: those of new heads. Their names
// begin as those of PEFT's files.
std::vector<HfTensor> trained_heads(const HfFamily& family, const ModelConfig& config) {
  ModelConfig adapted = config;
  adapted.transformer.lora_rank = 1;
  const ParallelGroups alone;
  std::set<std::string> trained;
  make_model(adapted, alone)->visit([&](const std::string& name, const Parameter& parameter) {
    if (parameter.trainable && !is_lora_parameter(name)) trained.insert(name);
  });
  std::vector<HfTensor> heads;
  if (trained.empty()) return heads;
  for (HfTensor& tensor : hf_tensors(family, base_of(config))) {
    if (!trained.contains(tensor.ours)) continue;
    tensor.name.insert(0, kPrefix);
    heads.push_back(std::move(tensor));
  }
  return heads;
}

// The module of a head, as modules_to_save lists it: "pooler" of
// "base_model.model.bert.pooler.dense.weight" for the prefix "bert."
std::string module_to_save(const HfFamily& family, std::string_view name) {
  name.remove_prefix(kPrefix.size());
  if (!family.prefix.empty() && name.starts_with(family.prefix))
    name.remove_prefix(family.prefix.size());
  return std::string(name.substr(0, name.find('.')));
}

// Those that an adapter_config.json lists.
std::set<std::string> modules_to_save(const ordered_json& json) {
  std::set<std::string> modules;
  if (!json.is_object() || !json.contains("modules_to_save")) return modules;
  for (const ordered_json& module : json["modules_to_save"])
    if (module.is_string()) modules.insert(module.get<std::string>());
  return modules;
}

std::vector<AdaptableModule> adaptable_modules(const HfFamily& family, const ModelConfig& config) {
  std::vector<AdaptableModule> modules;
  std::map<std::string, size_t> parts;
  for (HfTensor& tensor : module_tensors(family, base_of(config))) {
    const std::string_view linear = linear_of(tensor.ours);
    if (linear.empty() || tensor.expert >= 0) continue;  // experts in one tensor have no adapters
    if (!tensor.name.ends_with(kWeight)) continue;       // a parameter of no linear
    const size_t part = parts[tensor.ours]++;
    modules.push_back({std::move(tensor), std::string(linear), part, 1});
  }
  for (AdaptableModule& module : modules) module.parts = parts.at(module.weight.ours);
  return modules;
}

// Index of our adapter for the module; -1: none.
int adapter_of(const AdaptableModule& module, const std::vector<std::string>& adapters,
               const HfFamily& family) {
  if (adapters.empty()) return -1;
  if (adapters.front() == module.linear) return 0;
  MEGATRON_CHECK(module.parts > 1, "a ", family.model_type, " model of Hugging Face has ",
                 module.name(), " as one module, adapters of its parts (", adapters.front(),
                 ") cannot be expressed in PEFT's format", "\nhint: train with --lora-targets ",
                 module.linear, ", or merge the adapters: --merge-adapter");
  const auto found = std::find(adapters.begin(), adapters.end(), module.part_target());
  return found == adapters.end() ? -1 : static_cast<int>(found - adapters.begin());
}

std::string replace_suffix(const std::string& weight, std::string_view suffix) {
  return weight.substr(0, weight.size() - kWeight.size() + 1) + std::string(suffix);
}

}  // namespace

LoraOptions adapter_options(const ModelConfig& config, std::string_view weight) {
  const std::string_view linear = linear_of(weight);
  return weight.find(".shared_experts.") == std::string_view::npos
             ? lora_options(part_config(config, weight), linear)
             : lora_options(shared_experts_config(config.transformer), linear);
}

bool is_peft_folder(const fs::path& folder) {
  std::error_code ignored;
  return !folder.empty() && fs::is_regular_file(folder / kPeftConfig, ignored);
}

std::vector<HfTensor> peft_tensors(const HfFamily& family, const ModelConfig& config) {
  const int64_t rank = config.transformer.lora_rank;
  std::vector<HfTensor> tensors;
  for (const AdaptableModule& module : adaptable_modules(family, config)) {
    const TransformerConfig part = part_config(config, module.weight.ours);
    const int adapter = adapter_of(module, lora_adapters(part, module.linear), family);
    if (adapter < 0) continue;
    const LoraOptions options = adapter_options(config, module.weight.ours);
    const HfTensor& weight = module.weight;
    const std::vector<int64_t> row_in_b = rows_in_b(options, weight.our_shape[0]);
    const int64_t k = weight.our_shape[1];

    HfTensor a;
    a.name = cat(kPrefix, module.name(), ".", kLoraA);
    a.shape = {rank, k};
    a.ours = replace_suffix(weight.ours, kLoraA);
    a.our_shape = {options.adapters * rank, k};
    a.runs = {{0, adapter * rank, rank}};
    tensors.push_back(std::move(a));

    HfTensor b;
    b.name = cat(kPrefix, module.name(), ".", kLoraB);
    b.shape = {0, rank};
    b.ours = replace_suffix(weight.ours, kLoraB);
    b.our_shape = {*std::max_element(row_in_b.begin(), row_in_b.end()) + 1, rank};
    for (const RowRun& run : weight.runs) {
      b.runs.push_back({run.theirs, row_in_b.at(static_cast<size_t>(run.ours)), run.count});
      b.shape[0] += run.count;
    }
    tensors.push_back(std::move(b));
  }
  for (HfTensor& head : trained_heads(family, config)) tensors.push_back(std::move(head));
  return tensors;
}

void keep_modules_to_save(const HfFamily& family, const std::string& json,
                          std::vector<HfTensor>& tensors) {
  const std::set<std::string> listed =
      modules_to_save(ordered_json::parse(json, nullptr, /*allow_exceptions=*/false));
  std::erase_if(tensors, [&](const HfTensor& tensor) {
    return !is_lora_parameter(tensor.ours) && !listed.contains(module_to_save(family, tensor.name));
  });
}

namespace {

class PeftReader {
 public:
  PeftReader(const fs::path& folder, const HfFamily& family, ModelConfig& config)
      : folder_(folder),
        name_(folder.string()),
        family_(family),
        config_(config),
        file_((check_files(folder), folder / kPeftSafetensors)),
        manifest_(name_) {}

  Checkpoint run() {
    read_settings();
    choose_head();
    choose_targets();
    manifest_.add_file(file_);
    std::set<std::string> used;
    std::map<std::string, std::string> factors;  // of adapters that several modules share, by ours
    for (const HfTensor& tensor : peft_tensors(family_, config_)) {
      used.insert(tensor.name);
      if (!is_lora_parameter(tensor.ours)) {  // of a head, which may be the base model's
        if (modules_to_save_.contains(module_to_save(family_, tensor.name)) ||
            file_.find(tensor.name) != nullptr)
          add(tensor);
        continue;
      }
      const bool shared = tensor.ours.ends_with(cat("in_proj.", kLoraA));
      const auto [first, added] = factors.try_emplace(tensor.ours, tensor.name);
      if (!shared || added)
        add(tensor);
      else
        check_copy(tensor.name, first->second);
    }
    for (const SafetensorsEntry& entry : file_.header().tensors)
      if (!used.contains(entry.name) && !is_behind_encoder(entry.name, used))
        manifest_.add_problem(entry.name +
                              " is in the file, the base model has no such module, or the adapter "
                              "no such part");
    return std::move(manifest_).open(folder_);
  }

 private:
  // Whether it adapts a layer of an encoder behind those of the model, whose output is taken: PEFT
  // adapts every layer of a folder.
  bool is_behind_encoder(const std::string& name, const std::set<std::string>& used) const {
    constexpr std::string_view kLayers = "vision_tower.encoder.layers.";
    const auto* own = config_.own.as<MimoConfig>();
    const size_t at = name.find(kLayers);
    if (own == nullptr || at == std::string::npos) return false;
    const size_t number = at + kLayers.size(), end = name.find('.', number);
    int64_t layer = -1;
    const auto [rest, error] =
        std::from_chars(name.data() + number, name.data() + name.size(), layer);
    return error == std::errc() && rest == name.data() + end && layer >= own->vision_num_layers &&
           used.contains(cat(name.substr(0, number), 0, name.substr(end)));
  }

  static void check_files(const fs::path& folder) {
    std::error_code ignored;
    for (const char* name : {kPeftConfig, kPeftSafetensors})
      MEGATRON_CHECK(fs::is_regular_file(folder / name, ignored), folder.string(), ": holds no ",
                     name,
                     fs::exists(folder / "adapter_model.bin", ignored)
                         ? "\nhint: adapter_model.bin is a pickle, which is never read; save the "
                           "adapter as safetensors"
                         : "\nhint: a folder that PEFT's save_pretrained() wrote is expected");
  }

  void read_settings() {
    const std::string name = (folder_ / kPeftConfig).string();
    const auto json = ordered_json::parse(read_file(folder_ / kPeftConfig), nullptr,
                                          /*allow_exceptions=*/false);
    MEGATRON_CHECK(json.is_object(), name, ": is no JSON object");
    const std::string type = json.value("peft_type", std::string("nothing"));
    MEGATRON_CHECK(type == "LORA", name, ": peft_type is ", type, ", LORA is built");
    for (const char* key : kNotBuilt)
      MEGATRON_CHECK(!json.contains(key) || is_off(json[key]), name, ": ", key, " ",
                     json[key].dump(), " is not built");
    MEGATRON_CHECK(!json.contains("bias") || json["bias"] == "none", name, ": bias ",
                   json["bias"].dump(), " is not built");
    MEGATRON_CHECK(json.contains("r") && json["r"].is_number_integer() && json["r"] > 0, name,
                   ": r is not a positive integer");
    MEGATRON_CHECK(
        json.contains("lora_alpha") && json["lora_alpha"].is_number() && json["lora_alpha"] > 0,
        name, ": lora_alpha is not a positive number");
    modules_to_save_ = modules_to_save(json);
    TransformerConfig& t = config_.transformer;
    t.lora_rank = json["r"].get<int64_t>();
    t.lora_alpha = json["lora_alpha"].get<double>();
    // alpha / sqrt(r) = alpha sqrt(r) / r
    if (json.value("use_rslora", false))
      *t.lora_alpha *= std::sqrt(static_cast<double>(t.lora_rank));
  }

  // An encoder without a head of classes gets that of the file.
  void choose_head() {
    const auto* own = config_.own.as<BertConfig>();
    if (config_.type == "bert" && own != nullptr && text_head_outputs(config_) == 0) {
      ModelConfig with = config_;
      BertConfig& heads = *with.own.as<BertConfig>();
      heads.bert_lm_head = heads.bert_binary_head = heads.bert_pooler = false;
      heads.bert_token_types = num_token_types(config_);
      heads.bert_classes = 1;
      for (const HfTensor& tensor : trained_heads(family_, with)) {
        if (tensor.ours != "classification_head.weight") continue;
        const SafetensorsEntry* entry = file_.find(tensor.name);
        if (entry == nullptr || entry->shape.size() != 2) continue;
        heads.bert_classes = entry->shape[0];
        config_.own = with.own;
      }
    }
    MEGATRON_CHECK(modules_to_save_.empty() || !trained_heads(family_, config_).empty(),
                   (folder_ / kPeftConfig).string(), ": modules_to_save ",
                   ordered_json(modules_to_save_).dump(), " is not built");
  }

  // Chooses the targets that the file has tensors for.
  void choose_targets() {
    std::vector<std::string> found;
    for (const AdaptableModule& module : adaptable_modules(family_, config_))
      for (const std::string_view suffix : {kLoraA, kLoraB})
        if (file_.find(cat(kPrefix, module.name(), ".", suffix)) != nullptr &&
            std::ranges::find(found, module.target()) == found.end())
          found.push_back(module.target());
    MEGATRON_CHECK(!found.empty(), name_, ": ", kPeftSafetensors,
                   " holds no adapter of a linear of a ", family_.model_type, " model",
                   file_.header().tensors.empty()
                       ? std::string()
                       : cat("\ndetail: its first tensor is ", file_.header().tensors[0].name));
    TransformerConfig& t = config_.transformer;
    t.lora_targets = written_out_lora_targets(found, adaptable_linears(t));
  }

  // The modules that are parts of our in_proj share one adapter.
  void check_copy(const std::string& name, const std::string& first) {
    const SafetensorsEntry *copy = file_.find(name), *entry = file_.find(first);
    const auto bytes = [&](const SafetensorsEntry& of) {
      std::string text(of.end - of.begin, '\0');
      file_.read(of, text.data());
      return text;
    };
    if (copy == nullptr || entry == nullptr || bytes(*copy) != bytes(*entry))
      manifest_.add_problem(cat(name, " is not in the file or differs from ", first,
                                ": adapters of modules that are one linear of ours share this "
                                "factor"));
  }

  void add(const HfTensor& tensor) {
    const SafetensorsEntry* entry = file_.find(tensor.name);
    if (entry == nullptr) {
      manifest_.add_problem(tensor.name + " is not in the file, although other layers have it");
      return;
    }
    const auto text = [](const std::vector<int64_t>& shape) { return ordered_json(shape).dump(); };
    if (entry->shape != tensor.shape) {
      manifest_.add_problem(cat(tensor.name, " has shape ", text(entry->shape),
                                ", by adapter_config.json and the base model it is ",
                                text(tensor.shape)));
      return;
    }
    manifest_.add_rows(tensor.ours, tensor.our_shape, {0, entry}, view_of(tensor), tensor.runs);
  }

  const fs::path folder_;
  const std::string name_;
  const HfFamily& family_;
  ModelConfig& config_;
  const SafetensorsFile file_;
  ForeignManifest manifest_;
  std::set<std::string> modules_to_save_;
};

// "b.c" of "a.b.c" for 2; the whole name if it has no more parts.
std::string_view end_of_name(std::string_view name, int parts) {
  size_t at = name.size();
  for (; parts > 0 && at != std::string_view::npos && at > 0; --parts) at = name.rfind('.', at - 1);
  return name.substr(at == std::string_view::npos || parts > 0 ? 0 : at + 1);
}

// target_modules for PEFT: of each module the shortest end of its name that is not the end of a
// module's that is not adapted. PEFT would adapt that, too.
std::vector<std::string> module_names(const HfFamily& family, const ModelConfig& config) {
  std::set<std::string> adapted;
  for (const AdaptableModule& module : adaptable_modules(family, config))
    if (adapter_of(module, lora_adapters(part_config(config, module.weight.ours), module.linear),
                   family) >= 0)
      adapted.insert(module.name());
  std::set<std::string, std::less<>> ends;  // of the others
  for (const HfTensor& tensor : module_tensors(family, base_of(config))) {
    if (!tensor.name.ends_with(kWeight)) continue;
    const std::string name = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    if (adapted.contains(name)) continue;
    for (int parts = 1;; ++parts) {
      const std::string_view end = end_of_name(name, parts);
      ends.emplace(end);
      if (end == name) break;
    }
  }
  std::set<std::string> names;
  for (const std::string& name : adapted) {
    int parts = 1;
    while (ends.contains(end_of_name(name, parts)) && end_of_name(name, parts) != name) ++parts;
    names.emplace(end_of_name(name, parts));
  }
  return {names.begin(), names.end()};
}

// The modules of new heads, in order.
std::vector<std::string> head_modules(const HfFamily& family, const ModelConfig& config) {
  std::set<std::string> names;
  for (const HfTensor& tensor : trained_heads(family, config))
    names.insert(module_to_save(family, tensor.name));
  return {names.begin(), names.end()};
}

// PEFT's name of what the model does; null: it has none.
ordered_json task_type(const ModelConfig& config) {
  if (config.type == "gpt") return "CAUSAL_LM";
  if (config.type == "t5") return "SEQ_2_SEQ_LM";
  if (num_classes(config) > 0) return "SEQ_CLS";
  return nullptr;
}

// A whole number without a decimal point, as PEFT writes it.
ordered_json number(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15) return static_cast<int64_t>(value);
  return value;
}

}  // namespace

Checkpoint open_peft_folder(const fs::path& folder, const HfFamily& family, ModelConfig& config) {
  return PeftReader(folder, family, config).run();
}

std::set<std::string> replaced_parameters(const ModelConfig& base, const ModelConfig& adapted) {
  const ParallelGroups alone;
  std::set<std::string> names;
  make_model(base, alone)->visit([&](const std::string& name, const Parameter&) {
    names.insert(name);
  });
  make_model(adapted, alone)->visit([&](const std::string& name, const Parameter&) {
    names.erase(name);
  });
  return names;
}

std::string write_peft_config(const HfFamily& family, const ModelConfig& config,
                              const std::string& base) {
  const TransformerConfig& t = config.transformer;
  const double alpha = t.lora_alpha.value_or(static_cast<double>(t.lora_rank));
  auto json = ordered_json::parse(base, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) json = ordered_json::object();
  const std::vector<std::string> heads = head_modules(family, config);
  const std::set<std::string> listed = modules_to_save(json);
  const bool lists_heads = std::ranges::includes(listed, heads);
  if (lists_heads && json.contains("r") && json["r"] == t.lora_rank &&
      json.contains("lora_alpha")) {
    const double root = json.value("use_rslora", false) ? std::sqrt(double(t.lora_rank)) : 1.0;
    if (json["lora_alpha"].is_number() && json["lora_alpha"].get<double>() * root == alpha)
      return base;
  }
  // Weights of Conv1D modules are [inputs, outputs].
  bool transposed = false;
  for (const AdaptableModule& module : adaptable_modules(family, config))
    transposed |= module.weight.transposed;
  json["peft_type"] = "LORA";
  json["task_type"] = task_type(config);
  if (!json.contains("base_model_name_or_path")) json["base_model_name_or_path"] = nullptr;
  json["bias"] = "none";
  json["fan_in_fan_out"] = transposed;
  json["inference_mode"] = true;
  json["init_lora_weights"] = true;
  json["lora_alpha"] = number(alpha);
  json["lora_dropout"] = 0.0;
  if (!heads.empty()) json["modules_to_save"] = heads;
  json["r"] = t.lora_rank;
  json["target_modules"] = module_names(family, config);
  json["use_dora"] = false;
  json["use_rslora"] = false;
  return json.dump(2);
}

const HfFamily& family_of_model(const Checkpoint& checkpoint, const ModelConfig& config) {
  const std::string kept = cat("huggingface/", kHfConfig);
  if (checkpoint.has_file(kept)) {
    const auto json = ordered_json::parse(checkpoint.read_file(kept), nullptr, false);
    if (json.is_object() && json.contains("model_type") && json["model_type"].is_string())
      if (const HfFamily* family = find_hf_family(json["model_type"].get<std::string>()))
        return *family;
  }
  const ModelConfig base = base_of(config);
  for (const HfFamily& family : hf_families()) {
    if (family.type != config.type) continue;
    try {
      write_hf_config(family, base, "{}");
      hf_tensors(family, base);
      return family;
    } catch (const Error&) {
      // Another family may have names for it.
    }
  }
  throw Error(cat(checkpoint.directory().string(),
                  ": no Hugging Face model family can express this model, so PEFT has no names for "
                  "its modules"));
}

void merge_adapter(const ModelConfig& config, const std::string& ours, int64_t first,
                   const at::Tensor& a, const at::Tensor& b, const at::Tensor& rows) {
  const LoraOptions options = adapter_options(config, ours);
  const std::vector<int8_t>& adapters = options.adapter_of_row;
  const auto adapter_at = [&](int64_t row) -> int64_t {
    return adapters.empty() ? 0 : adapters.at(static_cast<size_t>(row));
  };
  int64_t row_in_b = 0;
  for (int64_t row = 0; row < first; ++row) row_in_b += adapter_at(row) >= 0 ? 1 : 0;
  const int64_t last = first + rows.size(0);
  for (int64_t begin = first, end = first; begin < last; begin = end) {
    const int64_t adapter = adapter_at(begin);
    while (end < last && adapter_at(end) == adapter) ++end;
    if (adapter < 0) continue;
    at::Tensor part = rows.narrow(0, begin - first, end - begin);
    part.addmm_(b.narrow(0, row_in_b, end - begin).to(rows.scalar_type()),
                a.narrow(0, adapter * options.rank, options.rank).to(rows.scalar_type()), 1.0,
                options.scale);
    row_in_b += end - begin;
  }
}

}  // namespace megatron
