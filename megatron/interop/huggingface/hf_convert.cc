#include "megatron/interop/huggingface/hf_convert.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tokenizers/tokenizer_config.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

void report(const ConvertProgress& progress, uint64_t total, uint64_t bytes) {
  if (progress) progress(total, bytes);
}

// [rows, columns] of `element` bytes each -> [columns, rows].
void transpose(const std::vector<std::byte>& in, int64_t rows, int64_t columns, int64_t element,
               std::vector<std::byte>& out) {
  out.resize(in.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      std::memcpy(out.data() + (c * rows + r) * element, in.data() + (r * columns + c) * element,
                  static_cast<size_t>(element));
}

}  // namespace

ConvertResult import_hf_folder(const fs::path& folder, const fs::path& root,
                               const ConvertProgress& progress, const fs::path& adapter) {
  HfImport model{open_hf_folder(folder), {}, {}};
  model.tokenizer = hf_tokenizer(folder, model.source.model.config.vocab_size);
  for (std::string* path :
       {&model.tokenizer.tokenizer_model, &model.tokenizer.vocab_file, &model.tokenizer.merge_file})
    if (!path->empty())
      *path = fs::path(*path).filename().string();  // it is among the checkpoint's copies
  for (const std::string& name : hf_tokenizer_files(folder))
    model.tokenizer_files.emplace_back("tokenizer/" + name, read_file(folder / name));
  return import_hf_model(std::move(model), root, progress, adapter);
}

ConvertResult import_hf_model(HfImport model, const fs::path& root, const ConvertProgress& progress,
                              const fs::path& adapter) {
  HfFolder& source = model.source;
  const ModelConfig base = source.model.config;
  std::optional<Checkpoint> adapters;
  if (!adapter.empty())
    adapters = open_peft_folder(adapter, *source.model.family, source.model.config);
  ConvertResult result;
  result.model_type = source.model.family->model_type;
  result.num_tensors = static_cast<int64_t>(source.tensors.size());
  result.waived = source.waived;
  ImportRequest request;
  request.root = root;
  request.sources = {&source.checkpoint};
  if (adapters) {
    request.sources.push_back(&*adapters);
    result.num_tensors +=
        static_cast<int64_t>(peft_tensors(*source.model.family, source.model.config).size());
  }
  request.files.emplace_back("config.yaml", model_yaml(source.model.config, model.tokenizer));
  for (auto& file : model.tokenizer_files) request.files.push_back(std::move(file));
  for (auto& file : origin_files(source.checkpoint)) request.files.push_back(std::move(file));
  if (adapters) {
    request.files.emplace_back(kKeptPeftConfig, read_file(adapter / kPeftConfig));
    request.left_out = replaced_parameters(base, source.model.config);
  }
  import_weights(request, progress, result);
  return result;
}

namespace {

// The model that a checkpoint of ours holds.
struct Origin {
  ModelConfig config;
  std::string config_json = "{}";  // that of the folder it was imported from
  std::string peft_json = "{}";    // adapter_config.json, if it has adapters
  bool has_adapters() const { return config.transformer.lora_rank > 0; }
};

Origin read_origin(const Checkpoint& checkpoint) {
  const std::string name = checkpoint.directory().string();
  Origin origin;
  origin.config = read_stored_config(checkpoint).model;
  // Adapters saved without their base model have no embedding table, and need none.
  int64_t& rows = origin.config.vocab_size;
  MEGATRON_CHECK(rows > 0 || origin.has_adapters(), name, ": no tensor ",
                 word_embeddings_of(origin.config.type), "\nhint: this is no checkpoint of a ",
                 find_model_type(origin.config.type).title, " model");
  if (rows == 0) rows = origin.config.padded_vocab_size = 1;
  for (auto& [kept, text] : origin_files(checkpoint)) {
    if (kept == kKeptHfConfig) origin.config_json = std::move(text);
    if (kept == kKeptPeftConfig) origin.peft_json = std::move(text);
  }
  return origin;
}

std::string model_type_of(const std::string& config_json) {
  const auto json = nlohmann::json::parse(config_json, nullptr, /*allow_exceptions=*/false);
  return json.is_object() && json.contains("model_type") && json["model_type"].is_string()
             ? json["model_type"].get<std::string>()
             : "";
}

ModelConfig without_adapters(ModelConfig config) {
  config.transformer.lora_rank = 0;
  return config;
}

// The family to write, and its config.json.
std::pair<const HfFamily*, std::string> choose_family(const Origin& origin,
                                                      const std::string& asked) {
  const std::string origin_type = model_type_of(origin.config_json);
  const std::string type = asked.empty() ? origin_type : asked;
  if (!type.empty()) {
    const HfFamily* family = find_hf_family(type);
    MEGATRON_CHECK(family != nullptr, "--hf-model-type ", type,
                   " is not known\nhint: types that are: ", hf_family_names());
    MEGATRON_CHECK(family->type == origin.config.type, "--hf-model-type ", type,
                   " is a family of models of type ", family->type,
                   ", the checkpoint holds one of type ", origin.config.type);
    return {family, write_hf_config(*family, origin.config,
                                    type == origin_type ? origin.config_json : "{}")};
  }
  std::string reasons;
  for (const HfFamily& family : hf_families()) {
    if (family.type != origin.config.type) continue;
    try {
      std::string text = write_hf_config(family, origin.config, "{}");
      // Throws if a tensor has no name in the family
      hf_tensors(family, without_adapters(origin.config));
      return {&family, std::move(text)};
    } catch (const Error& error) {
      const std::string what = error.what();
      reasons += "\ndetail: " + what.substr(0, what.find('\n'));
    }
  }
  throw Error("no known Hugging Face model family can express this model" + reasons);
}

// Whether it is the configuration of a model without a head.
bool is_bare(const HfFamily& family, const std::string& config_json) {
  return !family.bare_architecture.empty() &&
         HfFields(config_json, kHfConfig).texts("architectures") ==
             std::vector<std::string>{std::string(family.bare_architecture)};
}

// One file's share of the tensors.
struct Shard {
  std::vector<const HfTensor*> tensors;
  uint64_t bytes = 0;
};

class Exporter {
 public:
  Exporter(const ExportRequest& request, const ConvertProgress& progress)
      : request_(request),
        progress_(progress),
        checkpoint_(find(request)),
        origin_(read_origin(checkpoint_)) {}

  ConvertResult run() {
    std::error_code ignored;
    MEGATRON_CHECK(!fs::exists(request_.folder, ignored) || fs::is_empty(request_.folder, ignored),
                   request_.folder.string(), ": is not empty\nhint: give another --save");
    MEGATRON_CHECK(origin_.has_adapters() || !request_.merge_adapter,
                   "--merge-adapter: ", checkpoint_.directory().string(),
                   " holds no adapters (--lora-rank is 0)");
    auto [family, config_json] = choose_family(origin_, request_.model_type);
    tensors_ = hf_tensors(*family, without_adapters(origin_.config));
    if (is_bare(*family, config_json))
      for (HfTensor& tensor : tensors_) tensor.name.erase(0, family->prefix.size());
    const bool adapters_alone = origin_.has_adapters() && !request_.merge_adapter;
    std::vector<HfTensor> adapters;
    if (adapters_alone) {
      adapters = peft_tensors(*family, origin_.config);
      if (is_unchanged_adapter()) keep_modules_to_save(*family, origin_.peft_json, adapters);
    }
    if (origin_.has_adapters() && !checkpoint_.manifest().tensors.contains(tensors_.front().ours)) {
      MEGATRON_CHECK(adapters_alone, "--merge-adapter: ", checkpoint_.directory().string(),
                     " holds adapters without their base",
                     "\nhint: convert them to a folder of PEFT, that folder and the base to a "
                     "checkpoint (--adapter), and merge that");
      tensors_.clear();  // saved without its frozen weights
    }
    check_checkpoint();
    find_rounded();
    if (!tensors_.empty())
      for (HfTensor& copy : hf_copies(*family, without_adapters(origin_.config)))
        tensors_.push_back(std::move(copy));
    if (family->model_type == model_type_of(origin_.config_json)) add_carried();
    if (adapters_alone) tensors_ = std::move(adapters);
    fs::create_directories(request_.folder);
    result_.model_type = family->model_type;
    result_.iteration = checkpoint_.iteration();
    result_.directory = request_.folder;
    result_.num_tensors = static_cast<int64_t>(tensors_.size());
    if (adapters_alone) {
      write_in_one_file(kPeftSafetensors);
      put(kPeftConfig, is_unchanged_adapter()
                           ? origin_.peft_json
                           : write_peft_config(*family, origin_.config, origin_.peft_json));
      return std::move(result_);
    }
    write_tensors();
    copy_files();
    HfFields fields = HfFields::writer(config_json);
    fields.erase("torch_dtype");
    fields.erase("quantization_config");  // what is written is not quantised
    std::string dtype = torch_name(dtype_of(tensors_.front()));
    fields.text("dtype", dtype);
    put(kHfConfig, fields.text());
    return std::move(result_);
  }

 private:
  static Checkpoint find(const ExportRequest& request) {
    StartRequest start;
    start.mode = StartMode::kResume;
    start.load = request.load;
    start.ckpt_step = request.ckpt_step;
    return Checkpoint(resolve_start(start).checkpoint->directory);
  }

  // Whether it was imported from a folder of PEFT, and nobody has trained it since.
  bool is_unchanged_adapter() const {
    return is_weights_only(checkpoint_) && origin_.peft_json != "{}";
  }
  std::string table() const { return word_embeddings_of(origin_.config.type); }
  DType stored_dtype(const std::string& ours) const {
    return checkpoint_.manifest().tensors.at(ours).dtype;
  }
  DType dtype_of(const HfTensor& tensor) const {
    if (is_carried(tensor)) return carried_->entry(tensor.name).dtype;
    return rounded_.contains(tensor.ours) ? stored_dtype(table()) : stored_dtype(tensor.ours);
  }

  // A run keeps some values in fp32, whatever the type of its model. transformers has them in that
  // type, and saves them so; what was converted keeps the type that its files had.
  void find_rounded() {
    const auto& stored = checkpoint_.manifest().tensors;
    if (is_weights_only(checkpoint_) || !stored.contains(table())) return;
    const ParallelGroups groups;
    const std::unique_ptr<Model> model =
        make_model(without_adapters(origin_.config), groups);  // holds no memory
    const DType of_model = stored_dtype(table());
    model->visit([&](const std::string& key, Parameter& parameter) {
      if (parameter.keeps_fp32 && size_of(of_model) < size_of(DType::kFloat32) &&
          stored.contains(key) && stored_dtype(key) == DType::kFloat32)
        rounded_.insert(key);
    });
  }

  // Checks that every tensor of the checkpoint is one of the model (or the optimizer), with its
  // shape.
  void check_checkpoint() const {
    const std::string name = checkpoint_.directory().string();
    std::map<std::string, std::vector<int64_t>> expected;
    for (const HfTensor& tensor : tensors_) expected[tensor.ours] = tensor.our_shape;
    if (origin_.has_adapters()) {
      const ParallelGroups groups;
      const std::unique_ptr<Model> model = make_model(origin_.config, groups);  // holds no memory
      model->visit([&](const std::string& key, Parameter& parameter) {
        if (parameter.trainable) expected[key] = parameter.global_shape;
      });
    }
    const auto& stored = checkpoint_.manifest().tensors;
    for (const auto& [key, shape] : expected) {
      const auto found = stored.find(key);
      MEGATRON_CHECK(found != stored.end(), name, ": ", key,
                     " is not in the checkpoint, the model of its config.yaml has it");
      MEGATRON_CHECK(found->second.shape == shape, name, ": ", key, " has global shape ",
                     nlohmann::json(found->second.shape).dump(), ", by its config.yaml it is ",
                     nlohmann::json(shape).dump());
    }
    for (const auto& [key, tensor] : stored)
      MEGATRON_CHECK(expected.contains(key) || key.starts_with("optimizer."), name, ": ", key,
                     " is in the checkpoint, the model of its config.yaml has no such tensor");
  }

  void write_tensors() {
    std::vector<Shard> shards(1);
    for (const HfTensor& tensor : tensors_) {
      const uint64_t bytes = num_bytes(dtype_of(tensor), tensor.shape);
      if (shards.back().bytes > 0 && shards.back().bytes + bytes > request_.max_shard_bytes)
        shards.emplace_back();
      shards.back().tensors.push_back(&tensor);
      shards.back().bytes += bytes;
      result_.bytes += bytes;
    }
    report(progress_, result_.bytes, 0);
    nlohmann::ordered_json index = {{"metadata", {{"total_size", result_.bytes}}},
                                    {"weight_map", nlohmann::ordered_json::object()}};
    for (size_t i = 0; i < shards.size(); ++i) {
      std::string name = kHfSafetensors;
      if (shards.size() > 1)
        name = format_text("model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
      write_shard(name, shards[i]);
      for (const HfTensor* tensor : shards[i].tensors) index["weight_map"][tensor->name] = name;
    }
    if (shards.size() > 1) put(kHfIndex, index.dump(2) + "\n");
  }

  void write_in_one_file(const char* name) {
    Shard all;
    for (const HfTensor& tensor : tensors_) {
      all.tensors.push_back(&tensor);
      all.bytes += num_bytes(dtype_of(tensor), tensor.shape);
    }
    // By name, as transformers writes them.
    std::sort(all.tensors.begin(), all.tensors.end(),
              [](const HfTensor* a, const HfTensor* b) { return a->name < b->name; });
    result_.bytes = all.bytes;
    report(progress_, result_.bytes, 0);
    write_shard(name, all);
  }

  void write_shard(const std::string& name, const Shard& shard) {
    std::vector<SafetensorsEntry> entries;
    std::map<std::string_view, const HfTensor*> by_name;
    for (const HfTensor* tensor : shard.tensors) {
      entries.push_back({tensor->name, dtype_of(*tensor), tensor->stored_shape()});
      by_name[tensor->name] = tensor;
    }
    const std::string header = encode_safetensors_header(entries, {{"format", "pt"}});
    AtomicFileWriter file(request_.folder / name);
    file.write(header);
    for (const SafetensorsEntry& entry : entries) {
      const std::vector<std::byte>& bytes = read(*by_name.at(entry.name));
      file.write(bytes.data(), bytes.size());
      report(progress_, result_.bytes, bytes.size());
    }
    file.commit();
    result_.files.push_back(name);
  }

  // Gives names the beginnings of the folder that was imported, and adds the tensors of it that the
  // model does not compute with.
  void add_carried() {
    if (!checkpoint_.has_file(kKeptHfTensors)) return;
    checkpoint_.read_file(kKeptHfTensors);  // verifies it
    carried_.emplace(checkpoint_.directory() / kKeptHfTensors);
    using Beginnings = std::vector<std::pair<std::string, std::string>>;
    const auto beginnings =
        nlohmann::json::parse(carried_->header().metadata.at("beginnings")).get<Beginnings>();
    for (HfTensor& tensor : tensors_)
      for (const auto& [theirs, known] : beginnings)
        if (tensor.name.starts_with(known)) {
          tensor.name.replace(0, known.size(), theirs);
          break;
        }
    for (const SafetensorsEntry& entry : carried_->header().tensors) {
      HfTensor& tensor = tensors_.emplace_back();
      tensor.name = entry.name;
      tensor.shape = entry.shape;
    }
  }
  // Of none of ours.
  static bool is_carried(const HfTensor& tensor) { return tensor.ours.empty(); }

  // The bytes of a tensor as it is stored in their files.
  const std::vector<std::byte>& read(const HfTensor& tensor) {
    const DType dtype = dtype_of(tensor);
    ShardedTensor wanted = part_of_ours(tensor, dtype);
    memory_.resize(num_bytes(dtype, tensor.shape));
    if (is_carried(tensor)) {
      carried_->read(carried_->entry(tensor.name), memory_.data());
      return memory_;
    }
    wanted.data = memory_.data();
    LoadOptions options;
    options.convert_dtype = rounded_.contains(tensor.ours);
    options.wanted_elsewhere = {"*"};
    checkpoint_.load({&wanted, 1}, options);
    if (request_.merge_adapter) merge(tensor, wanted);
    if (has_expert_views(tensor)) return as_stored(tensor, size_of(dtype));
    if (!tensor.transposed) return memory_;
    transpose(memory_, tensor.shape[1], tensor.shape[0], size_of(dtype), transposed_);
    return transposed_;
  }

  // The experts in memory in the order of the stored tensor.
  const std::vector<std::byte>& as_stored(const HfTensor& tensor, int64_t element) {
    transposed_.resize(memory_.size());
    const int64_t rows = tensor.our_shape[1];
    const auto size = static_cast<size_t>(element);
    for (const HfExpertView& part : expert_views(tensor)) {
      const TensorView& view = part.view;
      for (int64_t r = 0; r < view.rows; ++r) {
        const std::byte* from =
            memory_.data() + (part.expert * rows + part.run.ours + r) * view.columns * element;
        std::byte* to = transposed_.data() + (view.first + r * view.row_stride) * element;
        for (int64_t c = 0; c < view.columns; ++c)
          std::memcpy(to + c * view.column_stride * element, from + c * element, size);
      }
    }
    return transposed_;
  }

  // Adds a linear's adapter product to the rows in memory, in fp32 (fp64), rounded once.
  void merge(const HfTensor& tensor, const ShardedTensor& loaded) {
    const std::string stem = tensor.ours.substr(0, tensor.ours.rfind('.') + 1);
    const std::string a_name = stem + std::string(kLoraA), b_name = stem + std::string(kLoraB);
    const auto& stored = checkpoint_.manifest().tensors;
    if (!tensor.ours.ends_with(".weight") || !stored.contains(a_name)) return;
    const at::Tensor rows =
        at::from_blob(memory_.data(), loaded.local_shape, at::dtype(to_scalar_type(loaded.dtype)));
    const at::Tensor sum = rows.to(loaded.dtype == DType::kFloat64 ? at::kDouble : at::kFloat,
                                   /*non_blocking=*/false, /*copy=*/true);
    const at::Tensor a = whole(a_name), b = whole(b_name);
    for (const RowRun& run : tensor.runs)
      merge_adapter(origin_.config, tensor.ours, run.ours, a, b,
                    sum.narrow(0, run.theirs, run.count));
    rows.copy_(sum);
  }

  at::Tensor whole(const std::string& key) const {
    const StoredTensor& stored = checkpoint_.manifest().tensors.at(key);
    ShardedTensor tensor;
    tensor.key = key;
    tensor.dtype = stored.dtype;
    tensor.global_shape = stored.shape;
    at::Tensor data = at::empty(stored.shape, to_scalar_type(stored.dtype));
    tensor.data = data.data_ptr();
    load_one(checkpoint_, tensor);
    return data;
  }

  void copy_files() {
    constexpr std::string_view kTokenizer = "tokenizer/";
    for (const StoredFile& file : checkpoint_.manifest().files)
      if (file.name.starts_with(kTokenizer))
        put(file.name.substr(kTokenizer.size()), checkpoint_.read_file(file.name));
    describe_tokenizer();
    if (checkpoint_.has_file(kKeptHfGenerationConfig))
      put(kHfGenerationConfig, checkpoint_.read_file(kKeptHfGenerationConfig));
  }

  // A tokenizer trained here, or given as one file, has no tokenizer_config.json; without it
  // transformers has no end-of-text token.
  void describe_tokenizer() {
    constexpr const char* kName = "tokenizer_config.json";
    if (std::find(result_.files.begin(), result_.files.end(), kName) != result_.files.end()) return;
    const std::string text =
        tokenizer_config_json(request_.folder, origin_.config.transformer.max_position_embeddings);
    if (!text.empty()) put(kName, text);
  }

  void put(const std::string& name, const std::string& contents) {
    write_file_atomically(request_.folder / name, contents);
    result_.files.push_back(name);
  }

  const ExportRequest& request_;
  const ConvertProgress& progress_;
  const Checkpoint checkpoint_;
  const Origin origin_;
  std::vector<HfTensor> tensors_;
  std::optional<SafetensorsFile> carried_;
  std::set<std::string> rounded_;  // parameters that are written in the model's type
  ConvertResult result_;
  std::vector<std::byte> memory_, transposed_;
};

}  // namespace

ConvertResult export_hf_folder(const ExportRequest& request, const ConvertProgress& progress) {
  MEGATRON_CHECK(fs::is_directory(request.load), request.load.string(),
                 fs::exists(request.load) ? ": is a file, not the folder of a model"
                                          : ": there is no such folder",
                 "\nhint: give the folder that --save of `megatron pretrain` named, or one iter_* "
                 "directory in it");
  return Exporter(request, progress).run();
}

}  // namespace megatron
