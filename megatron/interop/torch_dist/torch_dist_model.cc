#include "megatron/interop/torch_dist/torch_dist_model.h"

#include <algorithm>
#include <map>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/torch_dist/torch_dist_names.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModelPrefixes[] = {"embedding.", "decoder.", "output_layer.", "mtp."};

bool is_of_model(std::string_view key) {
  return key.find("_extra_state") == key.npos &&
         std::any_of(std::begin(kModelPrefixes), std::end(kModelPrefixes),
                     [&](std::string_view prefix) { return key.starts_with(prefix); });
}

constexpr std::string_view kExperts = ".mlp.experts.";

class TorchDistReader {
 public:
  TorchDistReader(const fs::path& directory, const TransformerConfig& transformer,
                  std::optional<int64_t> vocab_size,
                  const std::optional<ParameterShapes>& parameters)
      : directory_(directory),
        name_(directory.string()),
        files_(open_torch_dist(directory, is_of_model)),
        manifest_(name_) {
    config_.transformer = transformer;
    const auto table = files_.manifest.tensors.find(kWordEmbeddings);
    MEGATRON_CHECK(table != files_.manifest.tensors.end() && table->second.shape.size() == 2, name_,
                   ": no tensor ", kWordEmbeddings, "\nhint: this is no checkpoint of a ",
                   find_model_type(config_.type).title, " model");
    const int64_t rows = table->second.shape[0];
    config_.vocab_size = config_.padded_vocab_size = vocab_size.value_or(rows);
    MEGATRON_CHECK(config_.vocab_size <= rows, name_, ": the embedding has ", rows,
                   " rows, the vocabulary ", config_.vocab_size, " tokens");
    if (rows > config_.vocab_size)
      waived_.push_back(
          cat("rows ", config_.vocab_size, " to ", rows - 1, " of the vocabulary: padding"));
    for (auto& [name, shape] : parameters ? *parameters : parameter_shapes(config_))
      expected_[name] = shape;
  }

  ForeignModel run() {
    for (const auto& [key, tensor] : files_.manifest.tensors) add(key, tensor);
    for (const auto& [name, shape] : expected_) {
      if (refused_.contains(name)) continue;
      if (const auto rows = rows_.find(name); rows != rows_.end())
        report_missing_rows(name, rows->second);
      if (const auto parts = parts_.find(name); parts != parts_.end())
        report_missing_parts(name, shape, parts->second);
      else if (!manifest_.contains(name))
        manifest_.add_problem(name +
                              " is not in the checkpoint, the model of its arguments has it");
    }
    add_one_to_weights();
    manifest_.set_files(std::move(files_.manifest.files));
    manifest_.set_iteration(files_.iteration);
    Checkpoint checkpoint = std::move(manifest_).open(directory_);
    std::map<std::string, int64_t> groups;  // waived tensors, by the beginning of their names
    for (const std::string& key : files_.others) ++groups[group_of(key)];
    for (const auto& [group, count] : groups)
      waived_.push_back(count == 1 ? group : cat(group, " (", count, ")"));
    return {config_, std::move(checkpoint), used_, std::move(waived_)};
  }

 private:
  static std::string group_of(const std::string& key) {
    if (key.ends_with("_extra_state") || key.find("_extra_state/") != std::string::npos)
      return "_extra_state of modules, which holds nothing without FP8";
    if (key.starts_with("optimizer") || key.starts_with("chained_"))
      return "states of the optimizer";
    return key.substr(0, key.find('/'));
  }

  // Adds a tensor of theirs: one of ours, a part of one, or one of each layer.
  void add(const std::string& key, const StoredTensor& tensor) {
    const TorchDistKey parsed = parse_torch_dist_key(key);
    ++used_;
    if (!parsed.is_stacked()) return add_part(key, parsed, parsed.layer.value_or(0), tensor);
    const int64_t layers = config_.transformer.num_layers;
    if (tensor.shape.size() < 2 || tensor.shape[0] != layers)
      return add_problem(
          key, tensor,
          cat("has shape ", format_shape(tensor.shape), ", expected ", layers, " layers"));
    const std::vector<StoredTensor> parts = unstacked(tensor);
    for (int64_t i = 0; i < layers; ++i) add_part(key, parsed, i, parts[static_cast<size_t>(i)]);
  }

  // "KEY (in FILE) PROBLEM", FILE being the first that holds some of it.
  void add_problem(const std::string& key, const StoredTensor& tensor, const std::string& problem) {
    std::string file;
    if (!tensor.fragments.empty())
      file =
          cat(" (in ",
              files_.manifest.files[static_cast<size_t>(tensor.fragments.front().file)].name, ")");
    manifest_.add_problem(cat(key, file, " ", problem));
  }

  // The parts of a tensor along its first dimension.
  static std::vector<StoredTensor> unstacked(const StoredTensor& tensor) {
    const auto count = static_cast<size_t>(tensor.shape[0]);
    std::vector<StoredTensor> parts(
        count, {tensor.dtype, {tensor.shape.begin() + 1, tensor.shape.end()}, {}});
    for (const Fragment& fragment : tensor.fragments) {
      Fragment part = fragment;
      part.box.offset.erase(part.box.offset.begin());
      part.box.shape.erase(part.box.shape.begin());
      part.flat_end = part.box.num_elements();
      const auto bytes = static_cast<uint64_t>(part.flat_end * size_of(tensor.dtype));
      for (int64_t i = 0; i < fragment.box.shape[0]; ++i, part.offset += bytes) {
        const auto index = static_cast<size_t>(fragment.box.offset[0] + i);
        if (index >= count) break;  // the manifest's check of the boxes reports it
        parts[index].fragments.push_back(part);
      }
    }
    return parts;
  }

  // Adds a tensor of one layer: one of ours, a half of it, an expert of it, or a half of that.
  void add_part(const std::string& key, const TorchDistKey& parsed, int64_t layer,
                const StoredTensor& tensor) {
    const std::string ours =
        our_name(parsed, layer, [&](const std::string& name) { return expected_.contains(name); });
    const auto found = expected_.find(ours);
    if (found == expected_.end()) {
      const bool tied =
          ours == "output_layer.weight" && !config_.transformer.untie_embeddings_and_output_weights;
      return add_problem(key, tensor,
                         cat("is in the checkpoint, the model of its arguments has no such tensor",
                             tied ? ": its output layer is tied to the embedding" : ""));
    }
    if (!add_to(ours, found->second, key, parsed, tensor)) refused_.insert(ours);
  }

  bool add_to(const std::string& ours, const std::vector<int64_t>& expected, const std::string& key,
              const TorchDistKey& parsed, const StoredTensor& tensor) {
    StoredTensor part = tensor;
    if (parsed.expert && !place_expert(key, *parsed.expert, expected, part)) return false;
    if (ours == kWordEmbeddings || ours == "output_layer.weight")
      drop_padding(part.shape, part.fragments, expected);
    if (parsed.half >= 0) place_half(parsed.half, ours.find(kExperts) != ours.npos, part);
    if (!parsed.part.empty() && !place_rows(ours, parsed.part, expected, part)) {
      add_problem(key, tensor, "is of rows that the model of its arguments has not");
      return false;
    }
    if (part.shape != expected) {
      add_problem(
          key, tensor,
          cat("has shape ", format_shape(tensor.shape), parsed.is_stacked() ? " per layer" : "",
              ", by the model's arguments it is ", expected_text(parsed, expected)));
      return false;
    }
    StoredTensor* const stored = manifest_.tensor(ours, expected, key, tensor.dtype);
    if (stored == nullptr) return false;
    stored->fragments.insert(stored->fragments.end(),
                             std::make_move_iterator(part.fragments.begin()),
                             std::make_move_iterator(part.fragments.end()));
    if (parsed.expert || parsed.half >= 0)
      parts_[ours].emplace(parsed.expert.value_or(-1), parsed.half);
    if (!parsed.part.empty()) rows_[ours].insert(parsed.part);
    return true;
  }

  // Weights that are stored as their difference from 1: the sums, in fp32, are in a text in memory.
  void add_one_to_weights() {
    const Checkpoint theirs(directory_, files_.manifest);
    std::string bytes;
    const auto file = static_cast<int>(files_.manifest.files.size());
    for (const auto& [name, shape] : expected_) {
      if (!is_stored_from_one(name, config_.transformer) || !manifest_.contains(name)) continue;
      at::Tensor weight = at::empty(shape, at::kFloat);
      ShardedTensor wanted;
      wanted.key = torch_dist_place(name, config_.transformer).key;
      wanted.dtype = DType::kFloat32;
      wanted.global_shape = shape;
      wanted.data = weight.data_ptr();
      LoadOptions options;
      options.convert_dtype = true;
      options.wanted_elsewhere = {"*"};
      theirs.load({&wanted, 1}, options);
      weight += 1;
      Fragment fragment;
      fragment.file = file;
      fragment.offset = bytes.size();
      fragment.box = {std::vector<int64_t>(shape.size(), 0), shape};
      fragment.flat_end = weight.numel();
      bytes.append(static_cast<const char*>(weight.data_ptr()), weight.nbytes());
      manifest_.replace(name, {DType::kFloat32, shape, {fragment}});
    }
    if (!bytes.empty())
      files_.manifest.files.push_back(
          text_file("weights that are stored from 1", std::move(bytes)));
  }

  // Makes the rows of a part rows of ours; leaves it as it is if there are others.
  bool place_rows(const std::string& ours, std::string_view name,
                  const std::vector<int64_t>& expected, StoredTensor& part) const {
    for (const TorchDistRows& rows : torch_dist_rows(ours, config_.transformer)) {
      if (rows.part != name) continue;
      if (part.shape.empty() || part.shape[0] != rows.count) return true;
      for (Fragment& fragment : part.fragments) fragment.box.offset[0] += rows.first;
      part.shape[0] = expected[0];
      return true;
    }
    return false;
  }

  void report_missing_rows(const std::string& ours, const std::set<std::string>& present) {
    for (const TorchDistRows& rows : torch_dist_rows(ours, config_.transformer))
      if (!present.contains(std::string(rows.part)))
        manifest_.add_problem(cat("the rows ", rows.part, " of ", ours,
                                  " are not in the checkpoint, the model of its arguments has "
                                  "them"));
  }

  // Makes the tensor of one expert a part of ours, which holds all of them.
  bool place_expert(const std::string& key, int64_t expert, const std::vector<int64_t>& expected,
                    StoredTensor& part) {
    if (expert >= expected[0]) {
      add_problem(key, part,
                  cat("is of expert ", expert, ", by the model's arguments there are ", expected[0],
                      " experts, from 0"));
      return false;
    }
    part.shape.insert(part.shape.begin(), expected[0]);
    for (Fragment& fragment : part.fragments) {
      fragment.box.offset.insert(fragment.box.offset.begin(), expert);
      fragment.box.shape.insert(fragment.box.shape.begin(), 1);
    }
    return true;
  }

  // Makes the rows of a gate, or those of up, a part of a gated FC1.
  static void place_half(int half, bool of_experts, StoredTensor& part) {
    const size_t rows = of_experts ? 1 : 0;  // the dimension
    if (part.shape.size() <= rows) return;
    for (Fragment& fragment : part.fragments) fragment.box.offset[rows] += half * part.shape[rows];
    part.shape[rows] *= 2;
  }

  // The shape that a tensor of theirs should have.
  std::string expected_text(const TorchDistKey& parsed, std::vector<int64_t> shape) const {
    for (const TorchDistRows& rows :
         torch_dist_rows(cat(parsed.block, "0.", parsed.name), config_.transformer))
      if (rows.part == parsed.part) shape[0] = rows.count;
    if (parsed.half >= 0)
      shape[parsed.name.find(kExperts.substr(1)) == parsed.name.npos ? 0 : 1] /= 2;
    if (parsed.expert) shape.erase(shape.begin());
    return format_shape(shape);
  }

  // Of a tensor that is in the files in parts: (expert or -1, half or -1).
  using Parts = std::set<std::pair<int64_t, int>>;
  void report_missing_parts(const std::string& ours, const std::vector<int64_t>& shape,
                            const Parts& parts) {
    const bool experts = parts.begin()->first >= 0, halves = parts.begin()->second >= 0;
    for (int64_t expert = experts ? 0 : -1; expert < (experts ? shape[0] : 0); ++expert)
      for (int half = halves ? 0 : -1; half < (halves ? 2 : 0); ++half) {
        if (parts.contains({expert, half})) continue;
        manifest_.add_problem(cat(experts ? cat("expert ", expert, " of ") : "", ours,
                                  half < 0    ? ""
                                  : half == 0 ? " (rows of the gate, _w)"
                                              : " (rows of up, _v)",
                                  " is not in the checkpoint, the model of its arguments has it"));
      }
  }

  // Removes rows beyond the vocabulary.
  void drop_padding(std::vector<int64_t>& shape, std::vector<Fragment>& fragments,
                    const std::vector<int64_t>& expected) const {
    if (shape.size() != 2 || shape[0] <= expected[0] || shape[1] != expected[1]) return;
    shape[0] = expected[0];
    for (Fragment& fragment : fragments) {
      int64_t& rows = fragment.box.shape[0];
      rows = std::min(rows, expected[0] - fragment.box.offset[0]);
      fragment.flat_end = std::max<int64_t>(0, rows) * fragment.box.shape[1];
    }
    std::erase_if(fragments, [](const Fragment& fragment) { return fragment.flat_end == 0; });
  }

  const fs::path directory_;
  const std::string name_;
  TorchDistFiles files_;
  ModelConfig config_;
  std::map<std::string, std::vector<int64_t>> expected_;  // shapes of ours, by name
  ForeignManifest manifest_;
  std::map<std::string, Parts> parts_;                 // by the name of ours
  std::map<std::string, std::set<std::string>> rows_;  // parts of rows, by the name of ours
  std::set<std::string> refused_;  // tensors of ours of which a part does not fit
  int64_t used_ = 0;
  std::vector<std::string> waived_;
};

}  // namespace

ForeignModel open_torch_dist_model(const fs::path& directory, const TransformerConfig& transformer,
                                   std::optional<int64_t> vocab_size,
                                   const std::optional<ParameterShapes>& parameters) {
  MEGATRON_CHECK(transformer.num_layers > 0 && transformer.hidden_size > 0 &&
                     (transformer.num_attention_heads > 0 || !transformer.attends()),
                 directory.string(), ": holds no args, so the shape of its model is unknown",
                 "\nhint: give the flags of the model: --num-layers, --hidden-size, "
                 "--num-attention-heads, ...");
  return TorchDistReader(directory, transformer, vocab_size, parameters).run();
}

}  // namespace megatron
