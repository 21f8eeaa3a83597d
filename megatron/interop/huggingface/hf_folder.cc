#include "megatron/interop/huggingface/hf_folder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_quantized.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/rotary_embedding.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tekken.json",
                                           "tokenizer_config.json",
                                           "special_tokens_map.json",
                                           "added_tokens.json",
                                           "tokenizer.model",
                                           "vocab.json",
                                           "merges.txt",
                                           "vocab.txt",
                                           "chat_template.jinja",
                                           "chat_template.json"};

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
                 folder, ": ", name, " has shape ", format_shape(place.entry->shape),
                 ", the configuration rotates ", expected.size(0), " pairs",
                 "\nhint: the rotary form of these weights is not that of config.json");
  const at::Tensor stored = at::from_blob(const_cast<std::byte*>(bytes.data()), place.entry->shape,
                                          at::dtype(types.at(dtype)))
                                .to(at::kDouble);
  const double worst = ((stored - expected).abs() / expected).max().item<double>();
  MEGATRON_CHECK(worst < (size_of(dtype) == 2 ? 1e-2 : 1e-4), folder, ": ", name,
                 " holds other rotary frequencies than config.json gives (relative difference ",
                 worst, ")",
                 "\nhint: the rotary form of these weights is not that of config.json: compare "
                 "rope_theta and rope_parameters");
}

class HfFolderReader {
 public:
  explicit HfFolderReader(HfSource source)
      : source_(std::move(source)),
        name_(source_.name),
        model_(source_.model),
        files_(source_.files),
        manifest_(name_) {}

  HfFolder run() {
    find_prefix();
    tensors_ = hf_tensors(*model_.family, model_.config, [this](const std::string& name) {
      return files_.places().contains(name_in_files(name));
    });
    for (HfTensor& tensor : tensors_)
      if ((!source_.transposes || source_.straight.contains(name_in_files(tensor.name))) &&
          std::exchange(tensor.transposed, false))
        std::swap(tensor.shape[tensor.shape.size() - 2], tensor.shape.back());
    for (const HfTensor& copy : hf_copies(*model_.family, model_.config)) copies_[copy.name] = copy;
    manifest_.set_files(files_.stored());
    for (auto& [name, text] : source_.texts) manifest_.add_text(name, std::move(text));
    for (std::string& problem : source_.problems) manifest_.add_problem(std::move(problem));
    for (const HfTensor& tensor : tensors_) add(tensor);
    for (const std::string& name : model_.carried)
      if (const std::string theirs = name_in_files(name);
          files_.places().contains(theirs) && !used_.contains(theirs))
        carried_.insert(theirs);
    for (const auto& [name, place] : files_.places())
      if (!used_.contains(name) && !carried_.contains(name)) account_for(name, place);
    report_experts(missing_experts_, cat(" not in the files, ", source_.described_by, " gives "));
    report_experts(further_experts_, cat(" in the files, ", source_.described_by, " gives "));
    return {std::move(model_),
            std::move(manifest_).open(files_.folder()),
            {used_.begin(), used_.end()},
            std::move(waived_),
            {carried_.begin(), carried_.end()},
            beginnings_in_files()};
  }

 private:
  // Files of a model without a head have tensor names without the prefix, those of a larger model
  // another one.
  void find_prefix() {
    const std::string_view prefix = model_.family->prefix;
    const auto& places = files_.places();
    const auto is_prefix = [&](std::string_view given) {
      return std::any_of(places.begin(), places.end(),
                         [&](const auto& item) { return item.first.starts_with(given); });
    };
    bare_ = !is_prefix(prefix);
    const std::string_view enclosing = model_.family->enclosing.prefix;
    if (!enclosing.empty() && is_prefix(enclosing)) enclosing_ = enclosing;
  }
  std::string name_in_files(std::string_view name) const {
    for (const auto& [alias, known] : model_.family->aliases)
      if (known == name && !files_.places().contains(std::string(name))) name = alias;
    for (const auto& [theirs, known] : model_.family->beginnings)
      if (name.starts_with(known) && !files_.places().contains(std::string(name)))
        if (std::string other = cat(theirs, name.substr(known.size()));
            files_.places().contains(other))
          return other;
    const std::string_view prefix = model_.family->prefix;
    if (!name.starts_with(prefix)) return std::string(name);
    if (!enclosing_.empty()) return cat(enclosing_, name.substr(prefix.size()));
    return std::string(bare_ ? name.substr(prefix.size()) : name);
  }

  // The alternatives that names of the files begin with.
  std::vector<std::pair<std::string_view, std::string_view>> beginnings_in_files() const {
    std::vector<std::pair<std::string_view, std::string_view>> out;
    for (const auto& beginning : model_.family->beginnings) {
      const auto next = files_.places().lower_bound(std::string(beginning.first));
      const bool known = std::any_of(out.begin(), out.end(), [&](const auto& other) {
        return other.second == beginning.second;
      });
      if (!known && next != files_.places().end() && next->first.starts_with(beginning.first))
        out.push_back(beginning);
    }
    return out;
  }

  // By the layer: "model.layers.1.mlp.experts.*".
  using Experts = std::map<std::string, std::set<int64_t>>;

  // Notes an expert of which the files hold nothing, or which the model has not.
  bool note_expert(const std::string& name, Experts& experts) {
    const auto expert = expert_of_name(*model_.family, name);
    if (!expert) return false;
    experts[expert->first].insert(expert->second);
    return true;
  }

  // Whether the files hold some tensor of the same expert.
  bool holds_part_of_expert(const HfTensor& tensor) const {
    const auto expert = expert_of_name(*model_.family, tensor.name);
    if (!expert) return true;
    std::string prefix = name_in_files(expert->first);
    prefix.replace(prefix.size() - 1, 1, cat(expert->second, "."));
    const auto next = files_.places().lower_bound(prefix);
    return next != files_.places().end() && next->first.starts_with(prefix);
  }

  void report_experts(const Experts& layers, const std::string& what) {
    for (const auto& [layer, experts] : layers) {
      std::string list;
      for (auto first = experts.begin(); first != experts.end();) {
        auto last = first;
        while (std::next(last) != experts.end() && *std::next(last) == *last + 1) ++last;
        list += cat(list.empty() ? "" : ", ", *first);
        if (last != first) list += cat(" to ", *last);
        first = std::next(last);
      }
      manifest_.add_problem(cat(layer, ": expert", experts.size() > 1 ? "s " : " ", list,
                                experts.size() > 1 ? " are" : " is", what,
                                model_.config.transformer.num_experts, " experts"));
    }
  }

  // The reverse.
  std::string full_name(const std::string& name) const {
    if (enclosing_.empty()) return bare_ ? cat(model_.family->prefix, name) : name;
    return name.starts_with(enclosing_) ? cat(model_.family->prefix, name.substr(enclosing_.size()))
                                        : name;
  }

  void add(const HfTensor& tensor) {
    const std::string name = name_in_files(tensor.name);
    const auto found = files_.places().find(name);
    if (found == files_.places().end() && tensor.expert >= 0 && !holds_part_of_expert(tensor) &&
        note_expert(tensor.name, missing_experts_))
      return;
    if (found == files_.places().end()) {
      const bool head = tensor.ours.ends_with("output_layer.weight");
      manifest_.add_problem(
          cat(shown(name), " is not in the files, ",
              head ? cat("although ", source_.described_by,
                         " does not tie the output layer to the embedding (tie_word_embeddings)")
                   : cat("the model of ", source_.described_by, " has it")));
      return;
    }
    used_.insert(name);
    const SafetensorsEntry& entry = *found->second.entry;
    manifest_.add_zeros(tensor.ours, tensor.our_shape, entry.dtype, tensor.zeros);
    if (entry.shape != tensor.stored_shape()) {
      manifest_.add_problem(cat(shown(name), " has shape ", format_shape(entry.shape), ", by ",
                                source_.described_by, " it is ",
                                format_shape(tensor.stored_shape())));
      return;
    }
    if (!has_expert_views(tensor))
      return manifest_.add_rows(tensor.ours, tensor.our_shape, found->second, view_of(tensor),
                                tensor.runs, /*first_column=*/0, tensor.expert);
    for (const HfExpertView& part : expert_views(tensor))
      manifest_.add_rows(tensor.ours, tensor.our_shape, found->second, part.view, {&part.run, 1},
                         /*first_column=*/0, part.expert);
  }

  // Handles a tensor that no row of the table uses.
  void account_for(const std::string& name, const TensorFiles::Place& place) {
    const TransformerConfig& t = model_.config.transformer;
    const std::string table = word_embeddings_of(model_.config.type);
    if (!t.untie_embeddings_and_output_weights && is_head(name))
      return check_copy(name, place, table,
                        cat(source_.described_by, " ties them (tie_word_embeddings)"));
    if (const auto copy = copies_.find(full_name(name)); copy != copies_.end())
      return check_copy(name, place, copy->second.ours, "the layers share it");
    for (const std::string_view pattern : model_.family->waived) {
      if (!matches_waived(pattern, name)) continue;
      if (name.ends_with("inv_freq")) check_frequencies(name_, name, files_, place, t);
      waived_.push_back(name);
      return;
    }
    const auto expert = expert_of_name(*model_.family, full_name(name));
    if (expert && expert->second >= t.num_experts && t.has_moe()) {
      note_expert(full_name(name), further_experts_);
      return;
    }
    manifest_.add_problem(cat(shown(name), " is in the files, the model of ", source_.described_by,
                              " has no such tensor"));
  }

  bool matches_waived(std::string_view pattern, const std::string& name) const {
    if (matches_pattern(name_in_files(pattern), name) || matches_pattern(pattern, name))
      return true;
    return std::any_of(model_.family->beginnings.begin(), model_.family->beginnings.end(),
                       [&](const auto& beginning) {
                         const auto& [theirs, known] = beginning;
                         return pattern.starts_with(known) &&
                                matches_pattern(cat(theirs, pattern.substr(known.size())), name);
                       });
  }

  std::string shown(const std::string& name) const {
    return source_.shown ? source_.shown(name) : name;
  }

  bool is_head(const std::string& name) const {
    for (const std::span<const HfRow> rows : model_.family->rows)
      for (const HfRow& row : rows)
        if (row.ours.ends_with("output_layer.weight") && name_in_files(row.theirs[0]) == name)
          return true;
    return false;
  }

  // Checks that a stored tensor equals the one it is a copy of.
  void check_copy(const std::string& name, const TensorFiles::Place& copy, const std::string& ours,
                  const std::string& why) {
    for (const HfTensor& tensor : tensors_) {
      if (tensor.ours != ours) continue;
      const auto source = files_.places().find(name_in_files(tensor.name));
      if (source == files_.places().end()) return;  // reported already
      const SafetensorsEntry &a = *copy.entry, &b = *source->second.entry;
      const bool equal = a.dtype == b.dtype && a.shape == b.shape &&
                         files_.read(copy) == files_.read(source->second);
      if (equal)
        waived_.push_back(name);
      else
        manifest_.add_problem(cat(name, " differs from ", source->first, ", although ", why));
    }
  }

  HfSource source_;
  const std::string& name_;
  HfModel& model_;
  const TensorFiles& files_;
  ForeignManifest manifest_;
  std::vector<HfTensor> tensors_;
  std::map<std::string, HfTensor> copies_;  // by name
  Experts missing_experts_, further_experts_;
  bool bare_ = false;
  std::string_view enclosing_ = {};  // of a larger model: what stands for the prefix
  std::set<std::string> used_, carried_;
  std::vector<std::string> waived_;
};

}  // namespace

namespace {

// Whether the files hold a tensor of the layer, which counts from 0.
bool holds_layer(const fs::path& folder, const HfFamily& family, int64_t layer) {
  const int64_t index[] = {layer};
  std::string prefix = with_indices(cat(family.layers, "."), index);
  const TensorFiles files = TensorFiles::of_hf_folder(folder);
  for (const std::string& start : {prefix, prefix.substr(family.prefix.size())}) {
    const auto next = files.places().lower_bound(start);
    if (next != files.places().end() && next->first.starts_with(start)) return true;
  }
  return false;
}

}  // namespace

bool is_hf_folder(const fs::path& folder) {
  std::error_code ignored;
  if (folder.empty()) return false;  // no folder given; must not become the current one
  return fs::exists(folder / kHfConfig, ignored) && !fs::exists(folder / kManifestName, ignored) &&
         find_checkpoints(folder).empty();
}

namespace {

std::string text_of_config(const fs::path& folder) {
  constexpr uint64_t kMostBytes = uint64_t{64} << 20;
  const fs::path path = folder / kHfConfig;
  return hf_config_of_text_model(read_file(path, kMostBytes), path.string());
}

}  // namespace

HfModel read_hf_config(const fs::path& folder) {
  HfModel model = parse_hf_config(text_of_config(folder), (folder / kHfConfig).string());
  TransformerConfig& t = model.config.transformer;
  std::error_code ignored;
  const bool has_files =
      fs::exists(folder / kHfIndex, ignored) || fs::exists(folder / kHfSafetensors, ignored);
  if (t.mtp_num_layers > 0 && has_files && !holds_layer(folder, *model.family, t.num_layers))
    t.mtp_num_layers = 0;  // transformers leaves these layers out of what it writes
  if (model.family->fit != nullptr && has_files) {
    const TensorFiles files = TensorFiles::of_hf_folder(folder);
    const std::string_view prefix = model.family->prefix;
    model.family->fit(
        *model.family,
        [&](const std::string& name) {
          return files.places().contains(name) ||
                 (name.starts_with(prefix) && files.places().contains(name.substr(prefix.size())));
        },
        model.config);
  }
  return model;
}

HfFolder open_hf_folder(const fs::path& folder) {
  HfSource source{.name = folder.string(),
                  .model = read_hf_config(folder),
                  .files = TensorFiles::of_hf_folder(folder)};
  dequantise(source);
  return open_hf_source(std::move(source));
}

HfFolder open_hf_source(HfSource source) { return HfFolderReader(std::move(source)).run(); }

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

namespace {

// The text of kKeptHfTensors.
std::string carried_file(const HfFolder& folder) {
  const TensorFiles files = TensorFiles::of_hf_folder(folder.checkpoint.directory());
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : folder.carried) entries.push_back(*files.places().at(name).entry);
  std::string text = encode_safetensors_header(
      entries, {{"beginnings", nlohmann::json(folder.beginnings).dump()}});
  for (const SafetensorsEntry& entry : entries) {
    const std::vector<std::byte> bytes = files.read(files.places().at(entry.name));
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return text;
}

// The files of texts among origin_files().
StoredFiles config_files(const Checkpoint& source) {
  StoredFiles files;
  const fs::path& folder = source.directory();
  if (!is_hf_folder(folder)) {
    for (const char* name : {kKeptHfConfig, kKeptHfGenerationConfig, kKeptPeftConfig})
      if (source.has_file(name)) files.emplace_back(name, source.read_file(name));
    return files;
  }
  std::error_code ignored;
  for (const auto& [name, kept] :
       {std::pair{kHfConfig, kKeptHfConfig}, {kHfGenerationConfig, kKeptHfGenerationConfig}})
    if (fs::is_regular_file(folder / name, ignored))
      files.emplace_back(kept, std::string_view(name) == kHfConfig ? text_of_config(folder)
                                                                   : read_file(folder / name));
  return files;
}

}  // namespace

StoredFiles origin_files(const Checkpoint& source) {
  StoredFiles files = config_files(source);
  const fs::path& folder = source.directory();
  if (!is_hf_folder(folder)) {
    if (source.has_file(kKeptHfTensors))
      files.emplace_back(kKeptHfTensors, source.read_file(kKeptHfTensors));
  } else if (read_hf_config(folder).family->carried != nullptr) {
    files.emplace_back(kKeptHfTensors, carried_file(open_hf_folder(folder)));
  }
  return files;
}

namespace {

// One or several, under the key of the text of `name`; empty: it says none.
std::vector<int32_t> ids_under(const char* key, const std::string& name, const std::string& text) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object(), name, " is not a JSON object");
  const nlohmann::json given = json.value(key, nlohmann::json());
  if (given.is_null()) return {};
  std::vector<int32_t> ids;
  for (const nlohmann::json& id : given.is_array() ? given : nlohmann::json::array({given})) {
    const auto as_double = id.is_number_integer() ? id.get<double>() : HUGE_VAL;
    MEGATRON_CHECK(std::abs(as_double) < 2147483648.0, name, ": ", key, " is ", given.dump(),
                   "; expected an id, or a list of ids");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

std::vector<int32_t> stored_ids(const char* key, const Checkpoint& source) {
  const StoredFiles files = config_files(source);
  for (const auto& [name, kept_as] : {std::pair{kHfGenerationConfig, kKeptHfGenerationConfig},
                                      std::pair{kHfConfig, kKeptHfConfig}})
    for (const auto& [kept, text] : files) {
      if (kept != kept_as) continue;
      if (std::vector<int32_t> ids = ids_under(key, name, text); !ids.empty()) return ids;
    }
  return {};
}

}  // namespace

std::vector<int32_t> end_of_text_ids(const Checkpoint& source) {
  return stored_ids("eos_token_id", source);
}

std::optional<int32_t> decoder_start_id(const Checkpoint& source) {
  const std::vector<int32_t> ids = stored_ids("decoder_start_token_id", source);
  if (ids.empty()) return std::nullopt;
  return ids.front();
}

}  // namespace megatron
