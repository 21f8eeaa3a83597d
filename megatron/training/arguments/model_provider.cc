#include "megatron/training/arguments/model_provider.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/model_table.h"

namespace megatron {

Vocabulary likely_vocabulary(const Arguments& arguments) {
  constexpr int64_t kTypical = 32000;
  const TokenizerConfig& t = arguments.tokenizer;
  const int64_t size = t.vocab_size.value_or(t.padded_vocab_size.value_or(kTypical));
  return {size,
          t.padded_vocab_size.value_or(padded_vocab_size(t, size, arguments.vocabulary_ranks()))};
}

ModelProvider provide_model(std::string type) {
  return [type = std::move(type)](const Arguments& arguments, const Vocabulary& vocabulary,
                                  const ParallelGroups& groups, const StageSlice& slice,
                                  const std::vector<Model*>& chunks) {
    ModelConfig config;
    config.type = type;
    for (const OwnConfig& own : arguments.own)
      if (own.same_type(find_model_type(type).config)) config.own = own;
    config.transformer = arguments.transformer;
    config.vocab_size = vocabulary.size;
    config.padded_vocab_size = vocabulary.padded_size;
    config.sequence_parallel = arguments.parallel.sequence_parallel && groups.tp.size() > 1;
    config.pipeline_vocab_parallel = arguments.splits_vocabulary();
    EmbeddingTables tables;  // that this rank holds in another chunk
    for (Model* chunk : chunks) tables.add_missing(chunk->embedding_tables());
    return make_model(config, groups, slice, tables);
  };
}

std::unique_ptr<Model> whole_model(const ModelProvider& provider, const Arguments& arguments,
                                   const Vocabulary& vocabulary) {
  static const ParallelGroups kAlone;
  const StageLayout one(arguments.transformer.num_layers);
  return provider(arguments, vocabulary, kAlone, one.slice(0, 0), {});
}

void freeze_parameters(const TrainingConfig& config, Module& module) {
  module.visit([&](const std::string& path, Parameter& parameter) {
    if (config.freezes(parameter.name.empty() ? path : parameter.name)) parameter.trainable = false;
  });
}

void set_lr_factors(const OptimizerConfig& config, Module& module) {
  const std::vector<LrFactor> factors = config.rate_factors();
  module.visit([&](const std::string& path, Parameter& parameter) {
    size_t longest = 0;
    for (const LrFactor& of : factors) {
      if (of.name.size() < longest ||
          !stands_for(of.name, parameter.name.empty() ? path : parameter.name))
        continue;
      longest = of.name.size();
      parameter.lr_factor = of.factor;
    }
  });
}

void check_lr_factors(const OptimizerConfig& config, const StartConfig& start,
                      const std::vector<std::string>& names) {
  for (const LrFactor& of : config.rate_factors()) {
    require_match("--lr-factors", of.name, names);
    const bool trained = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return stands_for(of.name, name) && !start.freezes(name);
    });
    if (!trained)
      throw UsageError(cat("--lr-factors ", of.name,
                           " names frozen parameters alone\nhint: leave it out, or freeze less"));
  }
}

}  // namespace megatron
