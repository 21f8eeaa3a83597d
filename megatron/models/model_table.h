// The table of models.
//
// A new type is one folder with files like gpt/gpt_model.cc and its line in model_table.cc. Its
// flags, its checkpoints and its plans read the row; nobody else asks which type a model is of.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "megatron/models/common/ends_cost.h"
#include "megatron/models/model.h"

namespace megatron {

// Another type whose weights a new run may start from: patterns of the parameters that it has not,
// which start anew.
struct ModelOrigin {
  std::string_view type;  // empty: there is none
  std::vector<std::string> added;
};

struct ModelType {
  std::string_view name;   // in checkpoints and tables
  std::string_view title;  // in messages: "a checkpoint of a GPT model"
  // `tables`: as for make_model().
  std::unique_ptr<Model> (*make)(const ModelConfig& config, const ParallelGroups& groups,
                                 const StageSlice& slice, const EmbeddingTables& tables);
  EndsCost (*ends_cost)(const ModelConfig& config, const EndsShape& shape);
  OwnConfig config = {};  // flags of its own, with their defaults; ModelConfig::own
  // What a layer costs whose kind or sequence is not that of config.transformer; as
  // LayerCostFunction. Null: none is
  LayerCost (*layer_cost)(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                          bool offloaded) = nullptr;
  bool decodes = true;  // continues a sequence token by token, so that it can be served
  std::string_view not_served = {};  // why a server does not take it, if that is not `decodes`
  std::string_view language_model =
      {};  // what the names of its language model's parameters begin with
  // Why `ends_cost` and `layer_cost` are not all that a model costs; empty, null: they are
  std::string_view (*unplanned)(const ModelConfig& config) = nullptr;
  ModelOrigin origin = {};
};

template <class Architecture>
std::unique_ptr<Model> make_model_of(const ModelConfig& config, const ParallelGroups& groups,
                                     const StageSlice& slice, const EmbeddingTables& tables) {
  return std::make_unique<Architecture>(config, groups, slice, tables);
}

const std::vector<const ModelType*>& model_types();
// Throws Error that names the known types.
const ModelType& find_model_type(std::string_view name);

// The type as config.yaml of a checkpoint says it, "model_type: NAME"; of a gpt nothing, as in the
// checkpoints from before there were other types.
std::string model_type_yaml(std::string_view type);
// Reads it from such a file. Throws Error for a type that the table does not have.
std::string read_model_type(const std::string& config_yaml);

// The model of config.type; `groups` must outlive it. The whole model:
std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups);
// One segment. A table that segments of several stages use has a home on each of these stages, kept
// equal over a group of them; a segment uses `tables` if this rank holds them in another chunk
// (which must outlive this one).
std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups,
                                  const StageSlice& slice, const EmbeddingTables& tables = {});

// Why plans do not know what a model of config.type costs; empty: they do.
std::string_view unplanned_reason(const ModelConfig& config);

// What a layer of a model of config.type costs a rank; as LayerCostFunction.
LayerCost model_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                           bool offloaded);

// Names and shapes (without vocabulary padding) of the parameters of the whole model, in model
// order, and behind them of its state that is no parameter (Module::visit_state).
using ParameterShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;
ParameterShapes parameter_shapes(const ModelConfig& config);

}  // namespace megatron
