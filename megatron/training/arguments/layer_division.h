// How the layers of the model that arguments describe are divided over stages and chunks.
#pragma once

#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/transformer/layer/layer_cost.h"

namespace megatron {

// Whether flags say how many layers stages or chunks have, and not the number of these alone.
bool names_layers_of_stages(const PipelineConfig& config);

// Seconds of multiply-adds and of moved elements on an H100, as below.
PassCosts work_seconds(double weights, double scores, double again, double moved);

// Seconds of the passes of a layer for each token of the sequence, over all of its ranks:
// operations at the rate that GEMMs attain on an H100, the bytes of other kernels at that of its
// memory, in bf16.
PassCosts layer_seconds(const TransformerConfig& config, const LayerCost& layer);

// As the flags say. Where they say the number of stages and chunks alone, segments of a model of
// two stacks cost about the same floating-point operations, output layer included; stages of a
// hybrid model take about the same time on an H100 (divide_over_stages), embedding, output layer
// and recomputation included; segments of other models have equally many layers. Schedules
// that plan with the costs of a hybrid model's segments find them in the layout.
StageLayout divide_layers(const Arguments& arguments, const Vocabulary& vocabulary,
                          const ModelProvider& provider);

// Where encoders of media have ranks of their own, the segments of these, or of the `language`
// model behind them: as if one V stood before it.
StageLayout layout_of_module(const StageLayout& language, bool encodes,
                             const PipelineConfig& config);

}  // namespace megatron
