#include "megatron/models/model_table.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/placement.h"

namespace megatron {

namespace {

template <class Architecture>
std::unique_ptr<Model> make(const ModelConfig& config, const ParallelGroups& groups,
                            const StageSlice& slice, Parameter* table) {
  return std::make_unique<Architecture>(config, groups, slice, table);
}

constexpr ModelType kModelTypes[] = {
    {"gpt", make<GPTModel>},
};

}  // namespace

const ModelType& find_model_type(std::string_view name) {
  std::string known;
  for (const ModelType& type : kModelTypes) {
    if (type.name == name) return type;
    known += cat(known.empty() ? "" : ", ", type.name);
  }
  throw Error(cat("a model of type ", name, " is unknown\nhint: known types: ", known));
}

std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups) {
  return make_model(config, groups, {0, config.transformer.num_layers, true, true});
}

std::unique_ptr<Model> make_model(const ModelConfig& config, const ParallelGroups& groups,
                                  const StageSlice& slice, Parameter* table) {
  return find_model_type(config.type).make(config, groups, slice, table);
}

ParameterShapes parameter_shapes(const ModelConfig& config) {
  const ParallelGroups groups;
  const std::unique_ptr<Model> model = make_model(config, groups);  // holds no memory
  ParameterShapes shapes;
  model->visit([&](const std::string& name, Parameter& parameter) {
    shapes.emplace_back(name, logical_shape(parameter));
  });
  return shapes;
}

}  // namespace megatron
