#include "megatron/interop/gguf/gguf_model.h"

#include <algorithm>
#include <memory>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/dist_checkpointing/foreign/gguf_file.h"
#include "megatron/interop/gguf/gguf_architectures.h"
#include "megatron/interop/gguf/gguf_settings.h"
#include "megatron/interop/gguf/gguf_tensors.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/tokenizers/gguf_vocabulary.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostVocabulary = 1 << 20, kMostMerges = 1 << 21;
constexpr uint64_t kMostTemplateText = uint64_t{16} << 20;

// Refuses what is no model in one file.
void check_kind(const GgufFile& file) {
  const std::string type = file.text("general.type").value_or("model");
  MEGATRON_CHECK(type == "model", file.place("general.type"), ": is \"", type,
                 "\", expected a model");
  const int64_t parts = file.integer("split.count").value_or(1);
  MEGATRON_CHECK(parts <= 1, file.place("split.count"), ": the model is divided into ", parts,
                 " files, which is not built\nhint: llama-gguf-split --merge makes one of them");
  MEGATRON_CHECK(!file.tensors().empty(), file.path().string(),
                 ": has no tensors, only keys\nhint: this is the vocabulary of a model");
  const int64_t version = file.integer("general.quantization_version").value_or(2);
  MEGATRON_CHECK(version == 2, file.place("general.quantization_version"), ": is ", version,
                 ", only 2 is built");
}

const GgufArchitecture& architecture_of(const GgufFile& file) {
  const auto name = file.text("general.architecture", /*most_bytes=*/64);
  MEGATRON_CHECK(name.has_value(), file.place("general.architecture"), ": is not there");
  const bool experts = file.integer(*name + ".expert_count").value_or(0) > 0;
  const int64_t gating = file.integer(*name + ".expert_gating_func").value_or(0);
  const GgufArchitecture* const found = find_gguf_architecture(*name, experts, gating);
  const bool other = find_gguf_architecture(*name, !experts) != nullptr;
  MEGATRON_CHECK(found != nullptr, file.place("general.architecture"), ": \"", *name, "\"",
                 experts ? " with experts"
                 : other ? " without experts"
                         : "",
                 " is not built\nhint: those that are: ", gguf_architecture_names());
  return *found;
}

// -- tensors

// Whether the names of a row have their ".weight" or ".bias".
bool is_whole(const GgufName& row) {
  return row.name.ends_with(".weight") || row.name.ends_with(".bias");
}

// Joins a tensor of latent attention with that of the values.
void add_values(const GgufFile& file, GgufPart& part) {
  const GgufTensor& keys = *part.tensor;
  std::string name = keys.name;
  name.replace(name.find("attn_k_b"), 8, "attn_v_b");
  part.values = file.find_tensor(name);
  MEGATRON_CHECK(part.values != nullptr, file.place(keys), ": is there without ", name);
  const std::vector<int64_t>& values = part.values->shape;
  MEGATRON_CHECK(keys.shape.size() == 3 && values.size() == 3 && values[0] == keys.shape[0] &&
                     values[2] == keys.shape[1],
                 file.place(keys), ": its shape and that of ", name,
                 " do not fit: expected [heads, latent, keys] and [heads, values, latent]");
  part.shape = {keys.shape[0] * (keys.shape[2] + values[1]), keys.shape[1]};
}

// Fills the parts that a row of the table makes of a tensor; false: the row has another name.
bool add_parts_by(const GgufName& row, const GgufTensor& tensor, std::string_view stem,
                  std::string_view suffix, const TransformerConfig& t, const GgufFile& file,
                  std::vector<GgufPart>& parts) {
  const bool whole = is_whole(row);
  auto indices = indices_of(row.name, whole ? std::string_view(tensor.name) : stem);
  if (!indices) return false;
  if (whole) suffix = "";
  GgufPart part{.tensor = &tensor, .name = {}, .shape = tensor.shape};
  const int64_t d = t.kv_channels;
  const int64_t rows = tensor.shape[0];
  switch (row.form) {
    case GgufForm::kSame:
      break;
    case GgufForm::kPairedQueries:
    case GgufForm::kPairedKeys:
      MEGATRON_CHECK(d % 2 == 0 && rows % d == 0, file.place(tensor), ": has ", rows,
                     " rows, which are no heads of ", d);
      part.order = {.a = d / 2, .b = 2};
      break;
    case GgufForm::kJoinedByPart:
      MEGATRON_CHECK(rows % (3 * d) == 0, file.place(tensor), ": has ", rows,
                     " rows, which are no queries, keys and values of heads of ", d);
      part.order = {.a = 3, .b = rows / 3 / d, .inner = d};
      break;
    case GgufForm::kFromOne:
      part.shift = -1.0f;
      break;
    case GgufForm::kOneRow:
      if (part.shape.size() == 1) part.shape.insert(part.shape.begin(), 1);
      break;
    case GgufForm::kLatentKeys:
      add_values(file, part);
      break;
    case GgufForm::kLatentValues:
      return true;  // with those of keys, which the model misses if they are not there
  }
  const auto stars = [](std::string_view name) {
    return std::count(name.begin(), name.end(), '*');
  };
  if (stars(row.theirs) == stars(row.name)) {
    part.name = with_indices(row.theirs, *indices).append(suffix);
    parts.push_back(std::move(part));
    return true;
  }
  constexpr int64_t kMostExperts = 65536;
  const size_t dimensions = suffix == ".bias" ? 2 : 3;
  MEGATRON_CHECK(part.shape.size() == dimensions && rows <= kMostExperts, file.place(tensor),
                 ": has ", part.shape.size(), " dimensions and ", rows, " experts, expected ",
                 dimensions, " dimensions and at most ", kMostExperts, " experts");
  part.shape.erase(part.shape.begin());
  const int64_t size = part.shape[0] * (dimensions == 3 ? part.shape[1] : 1);
  indices->push_back(0);
  for (int64_t& expert = indices->back(); expert < rows; ++expert) {
    part.name = with_indices(row.theirs, *indices).append(suffix);
    part.first = expert * size;
    parts.push_back(part);
  }
  return true;
}

// The tensors that are settings: GgufSettings has read them.
bool is_setting(std::string_view name) {
  return name == "rope_freqs.weight" || name == "rope_factors_long.weight" ||
         name == "rope_factors_short.weight";
}

std::vector<GgufPart> parts_of(const GgufFile& file, const GgufArchitecture& architecture,
                               const TransformerConfig& config) {
  std::vector<GgufPart> parts;
  for (const GgufTensor& tensor : file.tensors()) {
    if (is_setting(tensor.name)) continue;
    bool found = false;
    for (const char* suffix : {".weight", ".bias"}) {
      if (!tensor.name.ends_with(suffix)) continue;
      const std::string_view stem =
          std::string_view(tensor.name)
              .substr(0, tensor.name.size() - std::string_view(suffix).size());
      for (const auto& rows : architecture.names)
        for (const GgufName& row : rows)
          found = found || add_parts_by(row, tensor, stem, suffix, config, file, parts);
    }
    MEGATRON_CHECK(found, file.place(tensor), ": a model of the architecture ", architecture.name,
                   " has no such tensor");
  }
  std::map<std::string_view, const GgufPart*> names;
  for (const GgufPart& part : parts) {
    const auto [other, added] = names.try_emplace(part.name, &part);
    MEGATRON_CHECK(added, file.place(*part.tensor), ": is the same weight as the tensor ",
                   other->second->tensor->name);
  }
  return parts;
}

// -- tokenizer

std::vector<std::pair<std::string, std::string>> chat_templates(const GgufFile& file) {
  constexpr std::string_view kKey = "tokenizer.chat_template";
  std::vector<std::pair<std::string, std::string>> templates;
  for (auto key = file.keys().lower_bound(kKey);
       key != file.keys().end() && key->first.starts_with(kKey); ++key) {
    std::string name = key->first.substr(kKey.size());
    if (!name.empty() && name[0] != '.') continue;  // tokenizer.chat_templates: their names
    templates.emplace_back(name.empty() ? "default" : name.substr(1),
                           *file.text(key->first, kMostTemplateText));
  }
  return templates;
}

GgufVocabulary read_vocabulary(const GgufFile& file, const GgufArchitecture& architecture,
                               std::string model) {
  const auto key = [](const char* name) { return cat("tokenizer.ggml.", name); };
  GgufVocabulary v;
  v.name = file.path().string();
  v.place = [&file](std::string_view name) { return file.place(name); };
  v.model = std::move(model);
  v.pre = file.text(key("pre"), 64).value_or("");
  MEGATRON_CHECK(file.keys().contains(key("tokens")), file.place(key("tokens")), ": is not there");
  // Counts first: what is inconsistent is refused before it takes memory.
  const uint64_t count = file.keys().find(key("tokens"))->second.count;
  for (const char* name : {"scores", "token_type"}) {
    const auto found = file.keys().find(key(name));
    MEGATRON_CHECK(found == file.keys().end() || found->second.count == count,
                   file.place(key(name)), ": has ", found->second.count, " elements for ", count,
                   " tokens");
  }
  v.scores = file.numbers(key("scores"), kMostVocabulary).value_or(std::vector<double>());
  v.types = file.integers(key("token_type"), kMostVocabulary).value_or(std::vector<int64_t>());
  v.tokens = *file.texts(key("tokens"), kMostVocabulary);
  v.merges = file.texts(key("merges"), kMostMerges).value_or(std::vector<std::string>());
  v.bos = file.integer(key("bos_token_id"));
  v.eos = file.integer(key("eos_token_id"));
  v.unknown = file.integer(key("unknown_token_id"));
  v.padding = file.integer(key("padding_token_id"));
  v.add_bos = file.boolean(key("add_bos_token"));
  v.add_eos = file.boolean(key("add_eos_token"));
  v.add_space_prefix = file.boolean(key("add_space_prefix"));
  MEGATRON_CHECK(!file.boolean(key("remove_extra_whitespaces")).value_or(false),
                 file.place(key("remove_extra_whitespaces")), ": is true, which is not built");
  v.merges_by_id = architecture.merges_by_id;
  v.strips_after_control = architecture.strips_after_control;
  v.chat_templates = chat_templates(file);
  return v;
}

// Empty: the file says that it has none.
TokenizerTexts tokenizer_of(const GgufFile& file, const GgufArchitecture& architecture,
                            int64_t vocab_size) {
  constexpr const char* kModel = "tokenizer.ggml.model";
  const std::string model = file.text(kModel, 64).value_or("none");
  if (model == "none" || model == "no_vocab") return {};
  const GgufVocabulary v = read_vocabulary(file, architecture, model);
  MEGATRON_CHECK(std::ssize(v.tokens) <= vocab_size, file.place("tokenizer.ggml.tokens"), ": has ",
                 v.tokens.size(), " elements, but token_embd.weight has ", vocab_size, " rows");
  return gguf_tokenizer_texts(v);
}

// generation_config.json: the ids that end a text or a turn.
std::string generation_config(const GgufFile& file, int64_t vocab_size) {
  JsonWriter json(2);
  json.begin_object();
  if (const auto bos = file.integer("tokenizer.ggml.bos_token_id"))
    json.member("bos_token_id", *bos);
  std::set<int64_t> ends;
  for (const char* name : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
    const std::string key = cat("tokenizer.ggml.", name);
    const auto id = file.integer(key);
    if (!id) continue;
    MEGATRON_CHECK(*id >= 0 && *id < vocab_size, file.place(key), ": is ", *id, ", expected 0 to ",
                   vocab_size - 1);
    ends.insert(*id);
  }
  if (!ends.empty()) json.member("eos_token_id", ends);
  json.end_object();
  return json.text() + "\n";
}

std::string config_json(const GgufFile& file, const GgufArchitecture& architecture) {
  GgufSettings settings(file, std::string(architecture.name));
  settings.find_integer("expert_count");
  settings.json().begin_object().member("model_type", architecture.model_type);
  architecture.settings(settings);
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const std::string_view key =
        id == std::string_view("pad_token_id") ? std::string_view("padding_token_id") : id;
    if (const auto value = file.integer(cat("tokenizer.ggml.", key)))
      settings.json().member(id, *value);
  }
  settings.finish();
  settings.json().end_object();
  return settings.json().text() + "\n";
}

// The name in the file of a tensor of Hugging Face, which the file may lack.
std::string name_in_file(const GgufArchitecture& architecture, const std::string& theirs) {
  for (const auto& rows : architecture.names)
    for (const GgufName& row : rows)
      if (const auto indices = indices_of(row.theirs, theirs); indices && is_whole(row))
        return with_indices(row.name, *indices);
  for (const char* suffix : {".weight", ".bias"}) {
    if (!theirs.ends_with(suffix)) continue;
    const auto stem =
        std::string_view(theirs).substr(0, theirs.size() - std::string_view(suffix).size());
    for (const auto& rows : architecture.names)
      for (const GgufName& row : rows)
        if (auto indices = indices_of(row.theirs, stem)) {
          indices->resize(static_cast<size_t>(std::ranges::count(row.name, '*')));
          return with_indices(row.name, *indices).append(suffix);
        }
  }
  return theirs;
}

}  // namespace

GgufModel open_gguf(const fs::path& path) {
  const auto file = std::make_shared<const GgufFile>(path);
  check_kind(*file);
  const GgufArchitecture& architecture = architecture_of(*file);
  const std::string config = config_json(*file, architecture);
  HfModel model = parse_hf_config(config, path.string());
  const int64_t vocab_size = model.config.vocab_size;
  std::vector<GgufPart> parts = parts_of(*file, architecture, model.config.transformer);
  TokenizerTexts tokenizer;
  std::string problem;
  try {
    tokenizer = tokenizer_of(*file, architecture, vocab_size);
  } catch (const Error& error) {
    problem = error.what();
  }
  HfFolder folder = open_hf_source(
      {.name = path.string(),
       .model = std::move(model),
       .files = gguf_tensor_files(file, std::move(parts)),
       .described_by = "its metadata",
       .transposes = false,
       .shown = [&](const std::string& name) { return name_in_file(architecture, name); },
       .texts = {{kKeptHfConfig, config},
                 {kKeptHfGenerationConfig, generation_config(*file, vocab_size)}}});
  return {std::move(folder), std::move(tokenizer), std::move(problem)};
}

TokenizerConfig gguf_tokenizer(const GgufModel& model) {
  TokenizerConfig config;
  config.tokenizer_type =
      model.tokenizer.tokenizer.empty() ? "NullTokenizer" : "HuggingFaceTokenizer";
  if (!model.tokenizer.tokenizer.empty()) config.tokenizer_model = "tokenizer.json";
  config.vocab_size = model.folder.model.config.vocab_size;
  return config;
}

ConvertResult import_gguf(const fs::path& path, const fs::path& root,
                          const ConvertProgress& progress, const fs::path& adapter) {
  GgufModel model = open_gguf(path);
  if (!model.tokenizer_problem.empty()) throw_error(model.tokenizer_problem);
  StoredFiles files;
  if (!model.tokenizer.tokenizer.empty())
    files = {{"tokenizer/tokenizer.json", model.tokenizer.tokenizer},
             {"tokenizer/tokenizer_config.json", model.tokenizer.config}};
  const TokenizerConfig tokenizer = gguf_tokenizer(model);
  return import_hf_model({std::move(model.folder), tokenizer, std::move(files)}, root, progress,
                         adapter);
}

}  // namespace megatron
