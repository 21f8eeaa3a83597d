#include "megatron/interop/import_weights.h"

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/models/model_table.h"

namespace megatron {

namespace fs = std::filesystem;

uint64_t num_bytes(DType dtype, const std::vector<int64_t>& shape) {
  uint64_t bytes = static_cast<uint64_t>(size_of(dtype));
  for (const int64_t extent : shape) bytes *= static_cast<uint64_t>(extent);
  return bytes;
}

void load_one(const Checkpoint& checkpoint, const ShardedTensor& tensor) {
  LoadOptions options;
  options.wanted_elsewhere = {"*"};
  checkpoint.load({&tensor, 1}, options);
}

ImportedTokenizer import_tokenizer(const TokenizerConfig& config) {
  ImportedTokenizer imported{config, config.vocab_size, {}};
  if (config.tokenizer_type.empty()) {
    imported.config.tokenizer_type = "NullTokenizer";
    return imported;
  }
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(config);
  imported.vocab_size = model_vocab_size(config, *tokenizer);
  for (const fs::path& file : tokenizer->files())
    imported.files.emplace_back("tokenizer/" + file.filename().string(), read_file(file));
  for (std::string* path :
       {&imported.config.tokenizer_model, &imported.config.vocab_file, &imported.config.merge_file})
    if (!path->empty() && !fs::is_directory(*path)) *path = fs::path(*path).filename().string();
  return imported;
}

std::string model_yaml(const ModelConfig& model, const TokenizerConfig& tokenizer) {
  TransformerConfig transformer = model.transformer;  // fields() is not const
  TokenizerConfig text = tokenizer;
  OwnConfig own = model.own;
  std::vector<Config*> configs = {&transformer, &text};
  if (own.config() != nullptr) configs.push_back(own.config());
  return model_type_yaml(model.type) + to_yaml(configs);
}

StoredConfig read_stored_config(const Checkpoint& checkpoint) {
  MEGATRON_CHECK(checkpoint.has_file("config.yaml"), checkpoint.directory().string(),
                 " holds no config.yaml, so the shape of its model is unknown",
                 "\nhint: checkpoints of `megatron pretrain` hold it");
  checkpoint.read_file("config.yaml");  // verifies it
  const std::string path = (checkpoint.directory() / "config.yaml").string();
  StoredConfig stored;
  stored.model.type = read_model_type(path);
  stored.model.own = find_model_type(stored.model.type).config;
  std::vector<Config*> configs = {&stored.model.transformer, &stored.tokenizer};
  if (Config* own = stored.model.own.config()) configs.push_back(own);
  read_yaml(configs, path, /*ignore_unknown=*/true);
  stored.model.transformer.finalize();
  const auto table = checkpoint.manifest().tensors.find(word_embeddings_of(stored.model.type));
  if (table != checkpoint.manifest().tensors.end() && !table->second.shape.empty())
    stored.model.vocab_size = stored.model.padded_vocab_size = table->second.shape[0];
  return stored;
}

std::string word_embeddings_of(std::string_view model_type) {
  return cat(find_model_type(model_type).language_model, kWordEmbeddings);
}

void check_no_checkpoints(const fs::path& root) {
  MEGATRON_CHECK(find_checkpoints(root).empty(), root.string(),
                 ": holds checkpoints already\nhint: give another --save");
}

void import_weights(const ImportRequest& request, const ConvertProgress& progress,
                    ConvertResult& result) {
  check_no_checkpoints(request.root);
  SaveRequest save;
  save.root = request.root;
  save.iteration = request.iteration;
  save.state = kWeightsOnlyState;
  save.files = request.files;
  const auto source_of = [&](const std::string& key) {
    const Checkpoint* last = nullptr;
    for (const Checkpoint* source : request.sources)
      if (source->manifest().tensors.contains(key)) last = source;
    return last;
  };
  for (const Checkpoint* source : request.sources) {
    for (const auto& [key, stored] : source->manifest().tensors) {
      if (source_of(key) != source || request.left_out.contains(key)) continue;
      ShardedTensor tensor;
      tensor.key = key;
      tensor.dtype = stored.dtype;
      tensor.global_shape = stored.shape;
      save.tensors.push_back(std::move(tensor));
      result.bytes += num_bytes(stored.dtype, stored.shape);
    }
  }
  const auto report = [&](uint64_t bytes) {
    if (progress) progress(result.bytes, bytes);
  };
  report(0);
  std::vector<std::byte> memory;
  uint64_t pending = 0;
  save.provide = [&](const ShardedTensor& wanted) -> const void* {
    report(pending);
    pending = num_bytes(wanted.dtype, wanted.global_shape);
    // Free the old memory first
    if (memory.capacity() < pending) std::vector<std::byte>().swap(memory);
    memory.resize(pending);
    ShardedTensor tensor = wanted;
    tensor.data = memory.data();
    load_one(*source_of(tensor.key), tensor);
    return memory.data();
  };
  const SaveResult saved = save_checkpoint(save);
  report(pending);
  result.directory = saved.directory;
  result.iteration = request.iteration;
  result.warnings = saved.warnings;
  result.files = {"manifest.json", "rank_00000.safetensors"};
  for (const auto& [name, contents] : save.files) result.files.push_back(name);
}

ConvertResult import_model(
    const fs::path& root, const TokenizerConfig& tokenizer,
    const std::function<ForeignModel(std::optional<int64_t> vocab_size)>& open,
    const ConvertProgress& progress) {
  check_no_checkpoints(root);
  ImportedTokenizer imported = import_tokenizer(tokenizer);
  const ForeignModel source = open(imported.vocab_size);
  if (tokenizer.tokenizer_type.empty()) imported.config.vocab_size = source.config.vocab_size;
  ConvertResult result;
  result.model_type = source.config.type;
  result.num_tensors = source.num_tensors;
  result.waived = source.waived;
  ImportRequest weights;
  weights.root = root;
  weights.iteration = source.checkpoint.iteration();
  weights.sources = {&source.checkpoint};
  weights.files = std::move(imported.files);
  weights.files.emplace_back("config.yaml", model_yaml(source.config, imported.config));
  import_weights(weights, progress, result);
  return result;
}

}  // namespace megatron
