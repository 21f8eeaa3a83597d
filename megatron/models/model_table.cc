#include "megatron/models/model_table.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {

namespace {

struct ModelTypeField : Config {
  std::string model_type = ModelConfig().type;
  void fields(FieldVisitor& visitor) override {
    visitor.group("model");
    visitor.field("model_type", model_type, "type of the model");
  }
};

}  // namespace

using ModelTypeRow = const ModelType&();
// The type that a file defines as NAME_model_type().
#define MEGATRON_MODEL(name)               \
  [] {                                     \
    extern ModelTypeRow name##_model_type; \
    return &name##_model_type();           \
  }()

const std::vector<const ModelType*>& model_types() {
  static const std::vector<const ModelType*> types = {
      MEGATRON_MODEL(gpt),   MEGATRON_MODEL(bert), MEGATRON_MODEL(t5),
      MEGATRON_MODEL(retro), MEGATRON_MODEL(mimo),
  };
  return types;
}

#undef MEGATRON_MODEL

const ModelType& find_model_type(std::string_view name) {
  for (const ModelType* type : model_types())
    if (type->name == name) return *type;
  throw Error(cat("a model of type ", name,
                  " is unknown\nhint: known types: ", listed(model_types(), &ModelType::name)));
}

std::string model_type_yaml(std::string_view type) {
  ModelTypeField field;
  if (field.model_type == type) return "";
  field.model_type = type;
  Config* const configs[] = {&field};
  return to_yaml(configs);
}

std::string read_model_type(const std::string& config_yaml) {
  ModelTypeField field;
  Config* const configs[] = {&field};
  read_yaml(configs, config_yaml, /*ignore_unknown=*/true);
  try {
    find_model_type(field.model_type);
  } catch (const Error& error) {
    throw_error(cat(config_yaml, ": ", error.what()));
  }
  return field.model_type;
}

std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups) {
  return make_model(config, groups, {0, config.transformer.num_layers, true, true});
}

std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups,
                                  const StageSlice& slice, const EmbeddingTables& tables) {
  return find_model_type(config.type).make(config, groups, slice, tables);
}

std::string_view unplanned_reason(const ModelConfig& config) {
  const auto reason = find_model_type(config.type).unplanned;
  return reason != nullptr ? reason(config) : std::string_view();
}

LayerCost model_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                           bool offloaded) {
  const ModelType& type = find_model_type(config.type);
  return type.layer_cost != nullptr
             ? type.layer_cost(config, layer_number, shape, offloaded)
             : layer_cost(config.transformer, layer_number, shape, offloaded);
}

ParameterShapes parameter_shapes(const ModelConfig& config) {
  const ParallelGroups groups;
  const std::unique_ptr<Model> model = make_model(config, groups);  // holds no memory
  ParameterShapes shapes;
  model->visit([&](const std::string& name, Parameter& parameter) {
    shapes.emplace_back(name, logical_shape(parameter));
  });
  model->visit_state([&](const std::string& name, at::Tensor& state) {
    shapes.emplace_back(name, state.sizes().vec());
  });
  return shapes;
}

}  // namespace megatron
