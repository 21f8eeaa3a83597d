#include "megatron/models/huggingface/hf_folder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/models/problems.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/rotary_embedding.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "tokenizer.model",
                                           "vocab.json",
                                           "merges.txt",
                                           "vocab.txt",
                                           "chat_template.jinja",
                                           "chat_template.json"};

std::string shape_text(const std::vector<int64_t>& shape) { return nlohmann::json(shape).dump(); }

bool matches(std::string_view pattern, std::string_view name) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return pattern == name;
  const std::string_view head = pattern.substr(0, star), tail = pattern.substr(star + 1);
  return name.size() >= head.size() + tail.size() && name.starts_with(head) && name.ends_with(tail);
}

// The safetensors files of a folder and where each tensor lies.
class TensorFiles {
 public:
  struct Place {
    size_t file;
    const SafetensorsEntry* entry;
  };

  explicit TensorFiles(const fs::path& folder) : folder_(folder) {
    std::error_code ignored;
    if (fs::exists(folder / kHfIndex, ignored)) {
      read_index();
    } else {
      MEGATRON_CHECK(fs::exists(folder / kHfSafetensors, ignored), folder.string(),
                     ": holds neither ", kHfSafetensors, " nor ", kHfIndex,
                     fs::exists(folder / "pytorch_model.bin", ignored) ||
                             fs::exists(folder / "pytorch_model.bin.index.json", ignored)
                         ? "\nhint: pytorch_model.bin is a pickle, which is never read; save the "
                           "model as safetensors"
                         : "");
      open(kHfSafetensors);
    }
  }

  const std::map<std::string, Place>& places() const { return places_; }
  const std::vector<std::string>& names() const { return names_; }
  const SafetensorsFile& file(size_t i) const { return files_[i]; }
  std::vector<std::byte> read(const Place& place) const {
    std::vector<std::byte> bytes(place.entry->end - place.entry->begin);
    files_[place.file].read(*place.entry, bytes.data());
    return bytes;
  }

 private:
  void open(const std::string& name) {
    files_.emplace_back(folder_ / name);
    names_.push_back(name);
    for (const SafetensorsEntry& entry : files_.back().header().tensors) {
      const auto [place, added] =
          places_.try_emplace(entry.name, Place{files_.size() - 1, nullptr});
      MEGATRON_CHECK(added, folder_.string(), ": tensor ", entry.name, " is in ",
                     names_[place->second.file], " and in ", name);
    }
    // Headers keep their place when files_ grows: they belong to the file's own memory.
    for (const SafetensorsEntry& entry : files_.back().header().tensors)
      places_.at(entry.name).entry = &entry;
  }

  void read_index() {
    const std::string name = (folder_ / kHfIndex).string();
    const auto json =
        nlohmann::json::parse(read_file(folder_ / kHfIndex), nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(
        json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(), name,
        ": has no object weight_map");
    std::set<std::string> names;
    for (const auto& [tensor, file] : json["weight_map"].items()) {
      MEGATRON_CHECK(file.is_string(), name, ": the file of ", tensor, " is no string");
      const std::string text = file.get<std::string>();
      MEGATRON_CHECK(!text.empty() && fs::path(text).filename() == fs::path(text), name, ": \"",
                     text, "\" is no name of a file in the folder");
      names.insert(text);
    }
    for (const std::string& file : names) {
      MEGATRON_CHECK(fs::exists(folder_ / file), name, ": names ", file,
                     ", which the folder does not hold");
      open(file);
    }
    for (const auto& [tensor, file] : json["weight_map"].items()) {
      const auto found = places_.find(tensor);
      MEGATRON_CHECK(
          found != places_.end() && names_[found->second.file] == file.get<std::string>(), name,
          ": says that ", tensor, " is in ", file.get<std::string>(), ", which does not hold it");
    }
    for (const auto& [tensor, place] : places_)
      MEGATRON_CHECK(json["weight_map"].contains(tensor), name, ": does not list ", tensor,
                     ", which is in ", names_[place.file]);
  }

  fs::path folder_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> names_;
  std::map<std::string, Place> places_;
};

// The stored frequencies of a layer must be those of the configuration.
void check_frequencies(const std::string& folder, const std::string& name, const TensorFiles& files,
                       const TensorFiles::Place& place, const TransformerConfig& config) {
  const at::Tensor expected = RotaryEmbedding(config).frequencies(/*length=*/1);
  const std::vector<std::byte> bytes = files.read(place);
  const DType dtype = place.entry->dtype;
  const std::map<DType, at::ScalarType> types = {{DType::kFloat64, at::kDouble},
                                                 {DType::kFloat32, at::kFloat},
                                                 {DType::kBFloat16, at::kBFloat16},
                                                 {DType::kFloat16, at::kHalf}};
  MEGATRON_CHECK(types.contains(dtype) && place.entry->shape.size() == 1 &&
                     place.entry->shape[0] == expected.size(0),
                 folder, ": ", name, " has shape ", shape_text(place.entry->shape),
                 ", the configuration rotates ", expected.size(0), " pairs",
                 "\nhint: the rotary form of these weights is not that of config.json");
  const at::Tensor stored = at::from_blob(const_cast<std::byte*>(bytes.data()), place.entry->shape,
                                          at::dtype(types.at(dtype)))
                                .to(at::kDouble);
  const double worst = ((stored - expected).abs() / expected).max().item<double>();
  MEGATRON_CHECK(worst < (size_of(dtype) == 2 ? 1e-2 : 1e-4), folder, ": ", name,
                 " holds other rotary frequencies than config.json means, by ", worst,
                 " of their value",
                 "\nhint: the rotary form of these weights is not that of config.json: compare "
                 "rope_theta and rope_parameters");
}

class Reader {
 public:
  explicit Reader(const fs::path& folder)
      : folder_(folder),
        name_(folder.string()),
        model_(read_hf_config(folder)),
        files_(folder),
        tensors_(hf_tensors(*model_.family, model_.config)) {}

  HfFolder run() {
    find_prefix();
    for (const HfTensor& tensor : tensors_) add(tensor);
    for (const auto& [name, place] : files_.places())
      if (!used_.contains(name)) account_for(name, place);
    throw_problems(name_, problems_);
    Manifest manifest;
    manifest.state = kWeightsOnlyState;
    for (size_t i = 0; i < files_.names().size(); ++i) {
      const SafetensorsHeader& header = files_.file(i).header();
      StoredFile file;
      file.name = files_.names()[i];
      file.bytes = header.data_begin + header.data_bytes;
      file.header_bytes = header.data_begin;
      file.has_checksums = false;
      manifest.files.push_back(std::move(file));
    }
    manifest.tensors = std::move(stored_);
    return {std::move(model_),
            Checkpoint(folder_, std::move(manifest)),
            {used_.begin(), used_.end()},
            std::move(waived_)};
  }

 private:
  // Files of the bare model name its tensors without the prefix.
  void find_prefix() {
    const std::string_view prefix = model_.family->prefix;
    const auto& places = files_.places();
    bare_ = std::none_of(places.begin(), places.end(),
                         [&](const auto& item) { return item.first.starts_with(prefix); });
  }
  std::string name_in_files(std::string_view name) const {
    for (const auto& [alias, known] : model_.family->aliases)
      if (known == name && !files_.places().contains(std::string(name))) name = alias;
    return std::string(bare_ && name.starts_with(model_.family->prefix)
                           ? name.substr(model_.family->prefix.size())
                           : name);
  }

  void add(const HfTensor& tensor) {
    const std::string name = name_in_files(tensor.name);
    const auto found = files_.places().find(name);
    if (found == files_.places().end()) {
      const bool head = tensor.ours == "output_layer.weight";
      problems_.push_back(cat(name, " is not in the files, ",
                              head ? "although config.json does not tie the output layer to the "
                                     "embedding (tie_word_embeddings)"
                                   : "the model of config.json has it"));
      return;
    }
    used_.insert(name);
    const SafetensorsEntry& entry = *found->second.entry;
    if (entry.shape != tensor.shape) {
      problems_.push_back(cat(name, " has shape ", shape_text(entry.shape),
                              ", by config.json it is ", shape_text(tensor.shape)));
      return;
    }
    StoredTensor& stored =
        stored_.try_emplace(tensor.ours, StoredTensor{entry.dtype, tensor.our_shape, {}})
            .first->second;
    if (stored.dtype != entry.dtype) {
      problems_.push_back(cat(name, " is stored as ", to_string(entry.dtype), ", other parts of ",
                              tensor.ours, " as ", to_string(stored.dtype)));
      return;
    }
    const int64_t columns = tensor.our_shape.size() > 1 ? tensor.our_shape[1] : 1,
                  element = size_of(entry.dtype);
    for (const RowRun& run : tensor.runs) {
      Fragment fragment;
      fragment.file = static_cast<int>(found->second.file);
      fragment.offset = entry.begin + static_cast<uint64_t>(
                                          run.theirs * (tensor.transposed ? 1 : columns) * element);
      fragment.box.offset.assign(tensor.our_shape.size(), 0);
      fragment.box.offset[0] = run.ours;
      fragment.box.shape = tensor.our_shape;
      fragment.box.shape[0] = run.count;
      fragment.flat_end = run.count * columns;
      if (tensor.transposed) fragment.column_stride = tensor.shape[1];
      stored.fragments.push_back(std::move(fragment));
    }
  }

  // A tensor that no row of the table uses.
  void account_for(const std::string& name, const TensorFiles::Place& place) {
    const TransformerConfig& t = model_.config.transformer;
    if (!t.untie_embeddings_and_output_weights && is_head(name)) return check_tie(name, place);
    for (const std::string_view pattern : model_.family->waived) {
      if (!matches(name_in_files(pattern), name)) continue;
      if (name.ends_with("inv_freq")) check_frequencies(name_, name, files_, place, t);
      waived_.push_back(name);
      return;
    }
    problems_.push_back(name + " is in the files, the model of config.json has no such tensor");
  }

  bool is_head(const std::string& name) const {
    for (const std::span<const HfRow> rows : model_.family->rows)
      for (const HfRow& row : rows)
        if (row.ours == "output_layer.weight" && name_in_files(row.theirs[0]) == name) return true;
    return false;
  }

  // A stored copy of a tied table must be the table.
  void check_tie(const std::string& name, const TensorFiles::Place& head) {
    for (const HfTensor& tensor : tensors_) {
      if (tensor.ours != "embedding.word_embeddings.weight") continue;
      const auto table = files_.places().find(name_in_files(tensor.name));
      if (table == files_.places().end()) return;  // reported already
      const SafetensorsEntry &a = *head.entry, &b = *table->second.entry;
      const bool equal = a.dtype == b.dtype && a.shape == b.shape &&
                         files_.read(head) == files_.read(table->second);
      if (equal)
        waived_.push_back(name);
      else
        problems_.push_back(cat(name, " differs from ", table->first,
                                ", although config.json ties them (tie_word_embeddings)"));
    }
  }

  const fs::path folder_;
  const std::string name_;
  HfModel model_;
  const TensorFiles files_;
  const std::vector<HfTensor> tensors_;
  bool bare_ = false;
  std::set<std::string> used_;
  std::vector<std::string> waived_, problems_;
  std::map<std::string, StoredTensor> stored_;
};

}  // namespace

bool is_hf_folder(const fs::path& folder) {
  std::error_code ignored;
  if (folder.empty()) return false;  // none was named, which is not the current one
  if (!fs::is_regular_file(folder / kHfConfig, ignored) ||
      fs::exists(folder / kManifestName, ignored))
    return false;
  const auto json =
      nlohmann::json::parse(read_file(folder / kHfConfig), nullptr, /*allow_exceptions=*/false);
  return json.is_object() && json.contains("model_type") && find_checkpoints(folder).empty();
}

HfModel read_hf_config(const fs::path& folder) {
  return parse_hf_config(read_file(folder / kHfConfig), (folder / kHfConfig).string());
}

HfFolder open_hf_folder(const fs::path& folder) { return Reader(folder).run(); }

std::vector<std::string> hf_tokenizer_files(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const char* name : kTokenizerFiles)
    if (fs::is_regular_file(folder / name, ignored)) names.emplace_back(name);
  return names;
}

TokenizerConfig hf_tokenizer(const fs::path& folder, int64_t vocab_size) {
  TokenizerConfig config = find_tokenizer(folder);
  if (config.tokenizer_type.empty()) config.tokenizer_type = "NullTokenizer";
  config.vocab_size = vocab_size;
  return config;
}

bool is_weights_only(const Checkpoint& checkpoint) {
  const auto state = nlohmann::json::parse(checkpoint.state(), nullptr, /*allow_exceptions=*/false);
  return state.is_object() && state.contains("weights_only") && state["weights_only"] == true;
}

}  // namespace megatron
