// The rows of the equivalence matrix: layouts of ranks that must train the same model as one rank.
#pragma once

#include <ostream>
#include <span>

namespace megatron {

struct LayoutRow {
  const char* name;
  const char* model;  // of the table in layouts.cc
  int world_size;
  // Flags of `pretrain` in addition to the model's; the run on one rank keeps those that do not
  // describe a layout
  const char* flags;
  const char* task = "gpt";
};

inline void PrintTo(const LayoutRow& row, std::ostream* out) { *out << row.flags; }

std::span<const LayoutRow> layout_rows();
// Those with FP8, in which no rank changes the order of a sum within a micro-batch.
std::span<const LayoutRow> quantized_rows();

// Those of models with experts.
std::span<const LayoutRow> expert_rows();
std::span<const LayoutRow> quantized_expert_rows();

struct ModelFlags {
  const char* name;
  const char* flags;
};
std::span<const ModelFlags> expert_models();

// Those of encoders and encoder-decoders.
std::span<const LayoutRow> encoder_rows();
std::span<const LayoutRow> more_encoder_rows();  // which `make matrix` alone takes
std::span<const ModelFlags> encoder_models();

// Those of models that read images.
std::span<const LayoutRow> vision_rows();
std::span<const ModelFlags> vision_models();

// Those of models that hear.
std::span<const LayoutRow> audio_rows();
std::span<const ModelFlags> audio_models();

// Those of models whose layers are letters of a pattern.
std::span<const LayoutRow> hybrid_rows();
std::span<const LayoutRow> more_hybrid_rows();  // which `make matrix` alone takes
std::span<const ModelFlags> hybrid_models();

// The flags of a model of the matrix.
const char* model_flags(const char* model);

}  // namespace megatron
