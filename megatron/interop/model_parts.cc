#include "megatron/interop/model_parts.h"

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_encoders.h"
#include "megatron/interop/import_weights.h"
#include "megatron/interop/load_model.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {
namespace {

class Zeros : public ComputedBytes {
 public:
  void read_at(uint64_t, void* out, size_t bytes) const override { std::memset(out, 0, bytes); }
};

using Shapes = std::map<std::string, std::vector<int64_t>>;

// "vision_model" of "vision_model.conv1.weight"; all of a name without a dot.
std::string module_of(const std::string& name) { return name.substr(0, name.find('.')); }

// The modules that another encoder than that of the language model's checkpoint replaces.
std::set<std::string> replaced_modules(const PartsRequest& request) {
  std::set<std::string> modules;
  if (!request.vision.empty()) modules = {"vision_model", "vision_projection", "image_newline"};
  if (!request.audio.empty()) modules.insert({"audio_model", "audio_projection"});
  return modules;
}

// Rows of the vocabulary that the stored table lacks: zeros.
void add_rows(const std::string& name, const std::vector<int64_t>& shape, Manifest& manifest) {
  StoredTensor& table = manifest.tensors.at(name);
  const int64_t rows = shape[0] - table.shape[0];
  StoredFile file;
  file.name = "zeros of " + name;
  file.bytes = static_cast<uint64_t>(rows * shape[1] * size_of(table.dtype));
  file.has_checksums = false;
  file.source = std::make_shared<Zeros>();
  Fragment fragment;
  fragment.file = static_cast<int>(manifest.files.size());
  fragment.box = {{table.shape[0], 0}, {rows, shape[1]}};
  fragment.flat_end = rows * shape[1];
  manifest.files.push_back(std::move(file));
  table.fragments.push_back(std::move(fragment));
  table.shape = shape;
}

// Whether `shape` is that of the stored table with rows of added tokens.
bool has_added_tokens(const std::string& name, const std::vector<int64_t>& stored,
                      const std::vector<int64_t>& shape) {
  const bool table =
      name.ends_with("word_embeddings.weight") || name.ends_with("output_layer.weight");
  return table && stored.size() == 2 && shape.size() == 2 && stored[1] == shape[1] &&
         stored[0] < shape[0] && shape[0] - stored[0] <= kMostAddedTokens;
}

// Of the language model's tensors, those that do not fit; adds rows to its tables.
std::vector<std::string> fit_language(const Shapes& expected, const std::string& prefix,
                                      Manifest& manifest, int64_t& added) {
  std::vector<std::string> problems;
  const auto of_language = [&](const std::string& name) {
    return name.starts_with(prefix) && !is_lora_parameter(name);
  };
  for (const auto& [name, shape] : expected) {
    if (!of_language(name)) continue;
    const auto stored = manifest.tensors.find(name);
    if (stored == manifest.tensors.end()) {
      problems.push_back(cat(name, " is not in it, the model of this run has it"));
    } else if (has_added_tokens(name, stored->second.shape, shape)) {
      added = shape[0] - stored->second.shape[0];
      add_rows(name, shape, manifest);
    } else if (stored->second.shape != shape) {
      problems.push_back(cat(name, " has shape ", format_shape(stored->second.shape),
                             ", by the flags of this run it is ", format_shape(shape)));
    }
  }
  for (const auto& [name, tensor] : manifest.tensors)
    if (of_language(name) && !expected.contains(name))
      problems.push_back(cat(name, " is in it, the model of this run has no such tensor"));
  return problems;
}

// By the names of the whole model, without the modules that are replaced.
Checkpoint language_part(const PartsRequest& request, const ModelConfig& config,
                         const Shapes& expected, std::vector<std::string>& notes) {
  if (!request.language) return {"", Manifest{}};
  const Checkpoint& given = *request.language;
  const std::string folder = given.directory().string(), type = stored_model_type(given),
                    prefix(find_model_type(config.type).language_model);
  const bool whole = type == config.type;
  MEGATRON_CHECK(whole || type == "gpt", folder, ": holds a model of type ", type,
                 ", expected the language model, of type gpt, or a whole model of type ",
                 config.type);
  const std::set<std::string> replaced = replaced_modules(request);
  Manifest manifest = given.manifest();
  std::map<std::string, StoredTensor> tensors = std::exchange(manifest.tensors, {});
  for (auto& [name, tensor] : tensors) {
    if (name.starts_with("optimizer.") || name.starts_with("fp8.")) continue;
    std::string ours = whole ? name : prefix + name;
    if (!replaced.contains(module_of(ours)))
      manifest.tensors.emplace(std::move(ours), std::move(tensor));
  }
  int64_t added = 0;
  throw_problems(folder, fit_language(expected, prefix, manifest, added));
  if (added > 0)
    notes.push_back(cat(folder, ": the last ", added,
                        " ids of the vocabulary have no rows in its tables: theirs begin at zero"));
  return {given.directory(), std::move(manifest)};
}

}  // namespace

ModelParts join_parts(const PartsRequest& request, const ModelConfig& config) {
  const ParameterShapes parameters = parameter_shapes(config);
  const Shapes expected(parameters.begin(), parameters.end());
  std::vector<std::string> notes;
  ModelParts parts{language_part(request, config, expected, notes), {}, {}, {}};
  std::set<std::string> stored;  // modules
  for (const auto& [name, tensor] : parts.language.manifest().tensors)
    stored.insert(module_of(name));
  std::vector<std::string> sources;
  if (request.language) sources.push_back(parts.language.directory().string());
  for (const auto& [folder, media] : {std::pair{request.vision, EncoderMedia::kImages},
                                      std::pair{request.audio, EncoderMedia::kSounds}}) {
    if (folder.empty()) continue;
    HfEncoder encoder = open_hf_encoder(folder, media, config, parameters);
    const std::string module = module_of(encoder.checkpoint.manifest().tensors.begin()->first);
    stored.insert(module);
    sources.push_back(cat(folder.string(), " (", module, ")"));
    if (encoder.num_unread > 0)
      notes.push_back(cat(folder.string(), ": ", encoder.num_unread, " of its tensors are no part ",
                          "of the ", module, " and are not read, such as ", encoder.unread));
    parts.encoders.push_back(std::move(encoder.checkpoint));
  }
  std::vector<std::string> begins_random;
  for (const auto& [name, shape] : expected) {
    const std::string module = module_of(name);
    if (is_lora_parameter(name) || !stored.insert(module).second) continue;
    begins_random.push_back(module);
    parts.random.push_back(module == name ? name : module + ".*");
  }
  notes.insert(notes.begin(), cat("starting from the weights of ", listed(sources)));
  if (!begins_random.empty()) notes.push_back("begins at random: " + listed(begins_random));
  parts.notes = std::move(notes);
  return parts;
}

}  // namespace megatron
