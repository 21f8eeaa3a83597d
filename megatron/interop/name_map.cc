#include "megatron/interop/name_map.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/parse.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLayer = "{layer}", kExpert = "{expert}";
constexpr const char* kTable = "embedding.word_embeddings.weight";

// -- the file

struct Source {
  std::string name;
  std::string slice;  // empty: all of it
  bool transpose = false;
};

struct Rule {
  std::string ours;  // with {layer} and {expert}
  HfLayout layout = HfLayout::kSame;
  size_t dim = 0;  // kStacked: dimension of concatenation
  std::vector<Source> sources;
};

struct NameMap {
  std::string path;
  std::vector<Rule> rules;
  std::vector<Source> waived;
};

class NameMapReader {
 public:
  explicit NameMapReader(const fs::path& path) { map_.path = path.string(); }

  NameMap read() && {
    YAML::Node root;
    try {
      root = YAML::Load(read_file(map_.path));
    } catch (const YAML::Exception& error) {
      fail(error.mark, error.msg);
    }
    check(root.IsMap(), root, "expected \"parameters:\" and \"waived:\" at the top level");
    for (const auto& entry : root) {
      const std::string key = text(entry.first, "a name");
      check(key == "parameters" || key == "waived", entry.first,
            cat("\"", key, "\" is unknown, expected parameters or waived"));
      if (key == "parameters") read_parameters(entry.second);
      if (key == "waived") read_waived(entry.second);
    }
    check(!map_.rules.empty(), root, "names no parameters");
    return std::move(map_);
  }

 private:
  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& what) const {
    throw_error(mark.is_null() ? cat(map_.path, ": ", what)
                               : cat(map_.path, ":", mark.line + 1, ": ", what));
  }
  void check(bool condition, const YAML::Node& node, const std::string& what) const {
    if (!condition) fail(node.Mark(), what);
  }
  std::string text(const YAML::Node& node, const std::string& what) const {
    check(node.IsScalar() && !node.Scalar().empty(), node, "expected " + what);
    return node.Scalar();
  }
  void check_keys(const YAML::Node& node, std::initializer_list<std::string_view> keys) const {
    for (const auto& entry : node) {
      const std::string key = text(entry.first, "a name");
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
      fail(entry.first.Mark(), cat("\"", key, "\" is unknown, expected ", listed(keys)));
    }
  }

  void read_parameters(const YAML::Node& node) {
    check(node.IsMap(), node, "parameters: expected lines of \"parameter: source\"");
    for (const auto& entry : node) {
      Rule rule;
      rule.ours = text(entry.first, "the name of a parameter");
      for (const Rule& other : map_.rules)
        check(other.ours != rule.ours, entry.first, rule.ours + " stands here twice");
      const YAML::Node& value = entry.second;
      const bool joined = value.IsMap() && (value["concat"] || value["qkv"]);
      if (!joined) {
        rule.sources = {source(value)};
      } else if (value["concat"]) {
        check_keys(value, {"concat", "dim"});
        rule.layout = HfLayout::kStacked;
        rule.sources = sources(value["concat"]);
        if (value["dim"]) rule.dim = text(value["dim"], "0 or 1") == "1" ? 1 : 0;
        check(!value["dim"] || value["dim"].Scalar() == std::to_string(rule.dim), value,
              "dim: expected 0 or 1");
      } else {
        check_keys(value, {"qkv"});
        const YAML::Node& qkv = value["qkv"];
        rule.sources = qkv.IsSequence() ? sources(qkv) : std::vector<Source>{source(qkv)};
        check(rule.sources.size() == 1 || rule.sources.size() == 3, qkv,
              "qkv: expected queries, keys and values as three sources, or one with all");
        rule.layout = rule.sources.size() == 3 ? HfLayout::kSeparateQKV : HfLayout::kJoinedQKV;
      }
      map_.rules.push_back(std::move(rule));
    }
  }

  void read_waived(const YAML::Node& node) {
    check(node.IsSequence(), node, "waived: expected a list of names");
    for (const YAML::Node& item : node) {
      map_.waived.push_back(source(item));
      check(!map_.waived.back().transpose, item, "waived: transpose has no effect");
    }
  }

  std::vector<Source> sources(const YAML::Node& node) const {
    check(node.IsSequence() && node.size() > 0, node, "expected a list of sources");
    std::vector<Source> list;
    for (const YAML::Node& item : node) list.push_back(source(item));
    return list;
  }

  Source source(const YAML::Node& node) const {
    if (!node.IsMap()) return {text(node, "the name of a tensor"), {}, false};
    check_keys(node, {"name", "slice", "transpose"});
    check(node["name"].IsDefined(), node, "expected \"name:\" of a tensor");
    Source out;
    out.name = text(node["name"], "the name of a tensor");
    if (node["slice"]) out.slice = text(node["slice"], "a slice like \"0:16, :\"");
    if (node["transpose"]) {
      const std::string value = text(node["transpose"], "true or false");
      check(value == "true" || value == "false", node, "transpose: expected true or false");
      out.transpose = value == "true";
    }
    return out;
  }

  NameMap map_;
};

// -- indices

// What {layer} and {expert} stand for; -1: nothing.
struct Indices {
  int64_t layer = -1, expert = -1;
};

// Nothing if the name of a parameter does not match.
std::optional<Indices> match(const std::string& ours, const std::string& name) {
  const std::string pattern = replaced(replaced(ours, kLayer, "*"), kExpert, "*");
  const auto found = indices_of(pattern, name);
  if (!found || ours.find('*') != std::string::npos) return std::nullopt;
  Indices indices;
  size_t at = 0;
  for (const int64_t index : *found) {
    at = ours.find('{', at);
    const bool of_expert = ours.compare(at, kExpert.size(), kExpert) == 0;
    int64_t& known = of_expert ? indices.expert : indices.layer;
    if (known >= 0 && known != index) return std::nullopt;
    known = index;
    ++at;
  }
  return indices;
}

std::string filled(std::string text, const Indices& indices) {
  if (indices.layer >= 0) text = replaced(std::move(text), kLayer, std::to_string(indices.layer));
  if (indices.expert >= 0)
    text = replaced(std::move(text), kExpert, std::to_string(indices.expert));
  return text;
}

bool names_expert(const std::vector<Source>& sources) {
  return std::any_of(sources.begin(), sources.end(), [](const Source& source) {
    return source.name.find(kExpert) != std::string::npos ||
           source.slice.find(kExpert) != std::string::npos;
  });
}

// -- slices

// A part of a stored tensor, and the view of it.
struct Piece {
  const TensorFiles::Place* place = nullptr;
  Box box;                     // in the tensor as stored
  std::vector<int64_t> shape;  // shape of the view: sliced, then transposed
  TensorView view;
  std::string text;  // "name[slice] transposed", for messages
};

int64_t parse_bound(std::string_view text, int64_t otherwise) {
  if (text.empty()) return otherwise;
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

// "0:16, :" -> the box and the dimensions that remain. Returns what is wrong, or "".
std::string cut(const std::string& slice, const std::vector<int64_t>& shape, Box& box,
                std::vector<size_t>& kept) {
  box = {std::vector<int64_t>(shape.size(), 0), shape};
  std::vector<std::string> parts;
  std::string compact = replaced(slice, " ", "");
  for (size_t begin = 0; begin <= compact.size();) {
    const size_t end = std::min(compact.find(',', begin), compact.size());
    parts.push_back(compact.substr(begin, end - begin));
    begin = end + 1;
  }
  if (slice.empty()) parts.assign(shape.size(), ":");
  if (parts.size() != shape.size())
    return cat("slice \"", slice, "\" has ", parts.size(), " dimensions");
  for (size_t d = 0; d < shape.size(); ++d) {
    const size_t colon = parts[d].find(':');
    const bool index = colon == std::string::npos;
    const std::string_view part = parts[d];
    const int64_t begin = parse_bound(part.substr(0, colon), index ? -1 : 0);
    const int64_t end = index ? begin + 1 : parse_bound(part.substr(colon + 1), shape[d]);
    if (begin < 0 || end <= begin || end > shape[d])
      return cat("slice \"", slice, "\": \"", part, "\" is no range within ", shape[d]);
    box.offset[d] = begin;
    box.shape[d] = end - begin;
    if (!index) kept.push_back(d);
  }
  return "";
}

// -- the model

class Mapper {
 public:
  Mapper(const fs::path& source, const fs::path& name_map, const TransformerConfig& transformer,
         std::optional<int64_t> vocab_size, const std::optional<ParameterShapes>& parameters)
      : map_(NameMapReader(name_map).read()),
        files_(TensorFiles::of_path(source)),
        manifest_(source.string()) {
    config_.transformer = transformer;
    config_.vocab_size = vocab_size.value_or(0);
    if (!vocab_size) config_.vocab_size = rows_of_table();
    config_.padded_vocab_size = config_.vocab_size;
    parameters_ = parameters ? *parameters : parameter_shapes(config_);
  }

  ForeignModel run() {
    manifest_.set_files(files_.stored());
    std::vector<bool> matched(map_.rules.size(), false);
    for (const auto& [name, shape] : parameters_) {
      const Rule* rule = nullptr;
      Indices indices;
      for (size_t i = 0; i < map_.rules.size(); ++i) {
        const auto found = match(map_.rules[i].ours, name);
        if (!found) continue;
        matched[i] = true;
        if (rule != nullptr)
          problem(cat(map_.path, ": ", name, " is made by ", rule->ours, " and by ",
                      map_.rules[i].ours));
        rule = &map_.rules[i];
        indices = *found;
      }
      if (rule == nullptr)
        problem(cat(map_.path, ": has no entry for ", name, ", which the model has with shape ",
                    format_shape(shape)));
      else
        fill_all(*rule, indices, name, shape);
    }
    for (size_t i = 0; i < map_.rules.size(); ++i)
      if (!matched[i]) unknown_parameter(map_.rules[i].ours);
    for (const Source& waiver : map_.waived) waive(waiver);
    account();
    Checkpoint checkpoint = std::move(manifest_).open(files_.folder());
    return {config_, std::move(checkpoint), num_used_, std::move(waived_)};
  }

 private:
  void problem(std::string text) { manifest_.add_problem(std::move(text)); }

  // Vocabulary size: rows of the embedding table that the map gives.
  int64_t rows_of_table() {
    for (const Rule& rule : map_.rules) {
      if (rule.ours != kTable) continue;
      int64_t rows = 0;
      for (const Source& source : rule.sources) {
        std::string wrong;
        const auto piece = find(source, {}, wrong);
        MEGATRON_CHECK(piece.has_value(), files_.folder().string(), ": ", wrong);
        const bool counts = rule.layout == HfLayout::kStacked && rule.dim == 0;
        rows = (counts ? rows : 0) + piece->shape[0];
      }
      return rows;
    }
    throw_error(cat(map_.path, ": has no entry for ", kTable, ", which every model has"));
  }

  // The part of a tensor that a source names; nothing if there is none, with the reason in `wrong`.
  std::optional<Piece> find(const Source& source, const Indices& indices,
                            std::string& wrong) const {
    Piece piece;
    const std::string name = filled(source.name, indices), slice = filled(source.slice, indices);
    piece.text =
        cat(name, slice.empty() ? "" : cat("[", slice, "]"), source.transpose ? " transposed" : "");
    const auto found = files_.places().find(name);
    if (found == files_.places().end()) {
      std::vector<std::string> names;
      for (const auto& [known, place] : files_.places()) names.push_back(known);
      const std::string near = nearest(name, names);
      wrong = cat(name, " is not in the files", near.empty() ? "" : cat("; did you mean ", near));
      return std::nullopt;
    }
    piece.place = &found->second;
    const std::vector<int64_t>& shape = found->second.entry->shape;
    std::vector<size_t> kept;
    wrong = cut(slice, shape, piece.box, kept);
    if (!wrong.empty()) {
      wrong = cat(name, " has shape ", format_shape(shape), ", ", wrong);
      return std::nullopt;
    }
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
    for (size_t d = 0; d < shape.size(); ++d) piece.view.first += piece.box.offset[d] * strides[d];
    if (kept.empty() || kept.size() > 2 || (source.transpose && kept.size() != 2)) {
      wrong = cat(piece.text, " has ", kept.size(), " dimensions, expected ",
                  source.transpose ? "2" : "1 or 2");
      return std::nullopt;
    }
    if (source.transpose) std::swap(kept[0], kept[1]);
    for (const size_t d : kept) piece.shape.push_back(piece.box.shape[d]);
    TensorView& view = piece.view;
    view.rows = piece.shape[0];
    view.row_stride = strides[kept[0]];
    if (kept.size() == 2) {
      view.columns = piece.shape[1];
      view.column_stride = strides[kept[1]];
    }
    if (kept.size() == 2 ? view.row_stride != 1 && view.column_stride != 1 : view.row_stride != 1) {
      wrong = cat(piece.text, " takes single elements out of rows of ", name, ", shape ",
                  format_shape(shape), ", which is not supported: its last dimension must stay");
      return std::nullopt;
    }
    return piece;
  }

  void fill_all(const Rule& rule, Indices indices, const std::string& name,
                const std::vector<int64_t>& shape) {
    if (indices.expert >= 0 || !names_expert(rule.sources) || shape.size() < 2)
      return fill(rule, indices, name, shape, shape, -1);
    const std::vector<int64_t> of_expert(shape.begin() + 1, shape.end());
    for (int64_t expert = 0; expert < shape[0]; ++expert) {
      indices.expert = expert;
      fill(rule, indices, name, of_expert, shape, expert);
    }
  }

  // Fills a parameter, or one expert of it (-1: all), which has this shape.
  void fill(const Rule& rule, const Indices& indices, const std::string& name,
            const std::vector<int64_t>& shape, const std::vector<int64_t>& whole, int64_t expert) {
    std::vector<Piece> pieces;
    for (const Source& source : rule.sources) {
      std::string wrong;
      std::optional<Piece> piece = find(source, indices, wrong);
      if (!piece) {
        problem(cat(wrong, "; ", map_.path, " makes ", name, " of it"));
      } else {
        use(*piece, name);
        pieces.push_back(std::move(*piece));
      }
    }
    if (pieces.size() < rule.sources.size()) return;
    if (!check_types(pieces, name) || !check_shapes(rule, pieces, name, shape)) return;
    int64_t done = 0;  // rows, or columns
    for (size_t part = 0; part < pieces.size(); ++part) {
      const Piece& piece = pieces[part];
      const int64_t rows = piece.shape[0];
      std::vector<RowRun> runs = {{0, 0, rows}};
      if (rule.layout == HfLayout::kStacked && rule.dim == 0)
        runs[0].ours = done;
      else if (rule.layout != HfLayout::kStacked)
        runs = row_runs(rule.layout, part, rows, config_.transformer);
      const bool columns = rule.layout == HfLayout::kStacked && rule.dim == 1;
      manifest_.add_rows(name, whole, *piece.place, piece.view, runs, columns ? done : 0, expert);
      if (rule.layout == HfLayout::kStacked) done += piece.shape[rule.dim];
    }
  }

  bool check_types(const std::vector<Piece>& pieces, const std::string& name) {
    bool right = true;
    for (const Piece& piece : pieces) {
      const DType dtype = piece.place->entry->dtype;
      if (dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
          dtype == DType::kFloat16)
        continue;
      problem(cat(piece.text, " is stored as ", to_string(dtype), ", which is no type of weights; ",
                  map_.path, " makes ", name, " of it"));
      right = false;
    }
    return right;
  }

  bool check_shapes(const Rule& rule, const std::vector<Piece>& pieces, const std::string& name,
                    const std::vector<int64_t>& shape) {
    if (rule.layout == HfLayout::kStacked) return check_joined(rule, pieces, name, shape);
    if (rule.layout != HfLayout::kSame && name.find(".linear_qkv.") == std::string::npos) {
      problem(
          cat(map_.path, ": ", name, " has no queries, keys and values, so qkv cannot make it"));
      return false;
    }
    bool right = true;
    for (size_t part = 0; part < pieces.size(); ++part) {
      std::vector<int64_t> expected = shape;
      expected[0] = rows_of_part(rule.layout, part, pieces.size(), shape[0], config_.transformer);
      if (pieces[part].shape == expected) continue;
      right = false;
      std::vector<int64_t> turned(expected.rbegin(), expected.rend());
      const bool vocabulary = (name == kTable || name == "output_layer.weight") &&
                              pieces[part].shape.size() == 2 &&
                              pieces[part].shape[1] == expected[1];
      problem(cat(pieces[part].text, " has shape ", format_shape(pieces[part].shape), ", as ",
                  pieces.size() > 1 ? "a part of " : "", name, " it is ", format_shape(expected),
                  pieces[part].shape == turned ? " (transpose?)" : "",
                  vocabulary ? " by the vocabulary (slice, and waive the rest?)" : ""));
    }
    return right;
  }

  bool check_joined(const Rule& rule, const std::vector<Piece>& pieces, const std::string& name,
                    const std::vector<int64_t>& shape) {
    int64_t extent = 0;
    bool right = rule.dim < shape.size();
    for (const Piece& piece : pieces) {
      right &= piece.shape.size() == shape.size();
      if (!right) continue;
      std::vector<int64_t> expected = shape;
      expected[rule.dim] = piece.shape[rule.dim];
      right &= piece.shape == expected;
      extent += piece.shape[rule.dim];
    }
    if (right && extent == shape[rule.dim]) return true;
    const std::string names =
        listed(pieces, [](const Piece& p) { return cat(p.text, " ", format_shape(p.shape)); });
    problem(cat(names, " joined along dimension ", rule.dim,
                right ? cat(" have ", extent, " there") : " do not fit together", ", ", name,
                " has shape ", format_shape(shape)));
    return false;
  }

  // Marks elements of a tensor as used; using one twice is a problem.
  void use(const Piece& piece, const std::string& by) {
    std::vector<std::pair<Box, std::string>>& uses = uses_[piece.place->entry->name];
    for (const auto& [box, user] : uses) {
      bool apart = false;
      for (size_t d = 0; d < box.offset.size(); ++d)
        apart |= box.offset[d] >= piece.box.offset[d] + piece.box.shape[d] ||
                 piece.box.offset[d] >= box.offset[d] + box.shape[d];
      if (!apart) problem(cat(piece.text, " is used twice: ", user, " and ", by));
    }
    uses.emplace_back(piece.box, by);
    if (by != kWaived && counted_.insert(piece.place->entry->name).second) ++num_used_;
  }

  void unknown_parameter(const std::string& ours) {
    std::vector<std::string> names;
    for (const auto& [name, shape] : parameters_) {
      std::string known = name;
      using Pair = std::pair<std::string_view, std::string_view>;
      for (const auto& [list, index] : {Pair{".layers.", kLayer}, Pair{".experts.", kExpert}}) {
        if (ours.find(index) == std::string::npos || known.find(list) == std::string::npos)
          continue;
        const size_t begin = known.find(list) + list.size(), end = known.find('.', begin);
        if (known.find_first_not_of("0123456789", begin) == end)
          known.replace(begin, end - begin, index);
      }
      names.push_back(known);
    }
    const std::string near = nearest(ours, names);
    problem(cat(map_.path, ": the model has no parameter ", ours,
                near.empty() ? "" : cat("; did you mean ", near)));
  }

  void waive(const Source& waiver) {
    if (!waiver.slice.empty()) {
      std::string wrong;
      const auto piece = find(waiver, {}, wrong);
      if (!piece) return problem(cat(wrong, "; ", map_.path, " waives it"));
      use(*piece, kWaived);
      waived_.push_back(piece->text);
      return;
    }
    bool any = false;
    for (const auto& [name, place] : files_.places()) {
      if (!matches_pattern(waiver.name, name)) continue;
      any = true;
      Piece whole;
      whole.place = &place;
      whole.box = {std::vector<int64_t>(place.entry->shape.size(), 0), place.entry->shape};
      whole.text = name;
      use(whole, kWaived);
      waived_.push_back(name);
    }
    if (!any)
      problem(cat(map_.path, ": waived: ", waiver.name, " is the name of no tensor in the files"));
  }

  // Checks that every element of the files is used or waived.
  void account() {
    for (const auto& [name, place] : files_.places()) {
      const auto uses = uses_.find(name);
      if (uses == uses_.end()) {
        problem(cat(name, " ", format_shape(place.entry->shape), " is in the files, ", map_.path,
                    " neither uses nor waives it"));
        continue;
      }
      const Box whole{std::vector<int64_t>(place.entry->shape.size(), 0), place.entry->shape};
      int64_t used = 0;
      for (const auto& [box, by] : uses->second) used += box.num_elements();
      if (used < whole.num_elements())
        problem(cat(name, " ", format_shape(place.entry->shape), ": ", map_.path,
                    " neither uses nor waives ", whole.num_elements() - used, " of its ",
                    whole.num_elements(), " elements"));
    }
  }

  static constexpr const char* kWaived = "waived";

  const NameMap map_;
  const TensorFiles files_;
  ForeignManifest manifest_;
  ModelConfig config_;
  ParameterShapes parameters_;
  std::map<std::string, std::vector<std::pair<Box, std::string>>> uses_;  // by name in the file
  std::set<std::string> counted_;
  int64_t num_used_ = 0;
  std::vector<std::string> waived_;
};

}  // namespace

ForeignModel open_mapped_model(const fs::path& source, const fs::path& name_map,
                               const TransformerConfig& transformer,
                               std::optional<int64_t> vocab_size,
                               const std::optional<ParameterShapes>& parameters) {
  MEGATRON_CHECK(transformer.num_layers > 0 && transformer.hidden_size > 0 &&
                     transformer.num_attention_heads > 0,
                 "--name-map does not give the model's shape\nhint: give the flags of the model, "
                 "or a --config file with them: --num-layers, --hidden-size, "
                 "--num-attention-heads, ...");
  return Mapper(source, name_map, transformer, vocab_size, parameters).run();
}

ConvertResult import_by_name_map(const NameMapImport& request, const ConvertProgress& progress) {
  return import_model(
      request.root, request.tokenizer,
      [&](std::optional<int64_t> vocab_size) {
        return open_mapped_model(request.source, request.name_map, request.transformer, vocab_size);
      },
      progress);
}

}  // namespace megatron
