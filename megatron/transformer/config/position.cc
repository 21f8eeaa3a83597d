#include "megatron/transformer/config/position.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kPositions[] = {"learned_absolute", "rope", "none", "yarn",
                                           "relative",         "mrope"};
constexpr std::string_view kRopeScalings[] = {"none", "linear", "llama3", "yarn", "longrope"};

}  // namespace

void PositionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("network behavior");
  v.choice("position_embedding_type", position_embedding_type, kPositions, "how positions enter");
  v.field("use_rotary_position_embeddings", use_rotary_position_embeddings,
          "old spelling of --position-embedding-type rope");
  v.field(
      {"add_position_embedding", "--no-position-embedding", true}, add_position_embedding,
      "no learned positions: --position-embedding-type none where it would be learned_absolute");
  v.field("rotary_base", rotary_base, "base of the rotary frequencies");
  v.field("rotary_percent", rotary_percent, "fraction of each head that is rotated");
  v.field("rotary_interleaved", rotary_interleaved, "rotate neighbouring pairs instead of halves");
  v.field("mrope_section", mrope_section,
          "mrope: rotated pairs that turn with a token's place in time, its row and its column");
  v.field("rotary_seq_len_interpolation_factor", rotary_seq_len_interpolation_factor,
          "divide positions by this");
  v.field("rotary_base_local", rotary_base_local,
          "base of the rotary frequencies in windowed layers, which are then not scaled; none: as "
          "in all");
  v.field("use_rope_scaling", use_rope_scaling,
          "scale rotary frequencies as Llama 3.1 does: --rope-scaling-type llama3");
  v.choice(
      "rope_scaling_type", rope_scaling_type, kRopeScalings,
      "how rotary frequencies are stretched for sequences longer than the model was trained on");
  v.field("rope_scaling_factor", rope_scaling_factor,
          "factor of linear, llama3, yarn and longrope scaling");
  v.field({"rope_original_max_position_embeddings",
           "--rope-original-max-position-embeddings --yarn-original-max-position-embeddings"},
          rope_original_max_position_embeddings,
          "length that the model was trained on before llama3, yarn or longrope scaling");
  v.field("rope_low_freq_factor", rope_low_freq_factor,
          "llama3: wavelengths above the original length over this are scaled");
  v.field("rope_high_freq_factor", rope_high_freq_factor,
          "llama3: wavelengths below the original length over this are kept");
  v.field("yarn_beta_fast", yarn_beta_fast,
          "yarn: frequencies with more turns in the original length are kept");
  v.field("yarn_beta_slow", yarn_beta_slow,
          "yarn: frequencies with fewer turns in the original length are scaled");
  v.field("yarn_correction_range_round_to_int", yarn_correction_range_round_to_int,
          "yarn: round the bounds of the range between kept and scaled frequencies");
  v.field("longrope_short_factor", longrope_short_factor,
          "longrope: divisor of each rotary frequency up to the original length");
  v.field("longrope_long_factor", longrope_long_factor,
          "longrope: divisor of each rotary frequency beyond the original length");
  v.field("rope_attention_factor", rope_attention_factor,
          "yarn and longrope: factor of cosines and sines; none: from the scaling factor");
}

void PositionConfig::finalize() {
  if (use_rotary_position_embeddings) position_embedding_type = PositionEmbedding::kRope;
  if (!add_position_embedding && position_embedding_type == PositionEmbedding::kLearnedAbsolute)
    position_embedding_type = PositionEmbedding::kNone;
  if (position_embedding_type == PositionEmbedding::kMrope && !mrope_section.empty())
    position_embedding_type = PositionEmbedding::kRope;
  if (position_embedding_type == PositionEmbedding::kYarn) {
    position_embedding_type = PositionEmbedding::kRope;
    if (rope_scaling_type == RopeScaling::kNone) rope_scaling_type = RopeScaling::kYarn;
  }
  if (use_rope_scaling && rope_scaling_type == RopeScaling::kNone)
    rope_scaling_type = RopeScaling::kLlama3;
}

int64_t PositionConfig::rotary_width(const ShapeConfig& shape) const {
  return static_cast<int64_t>(static_cast<double>(shape.kv_channels) * rotary_percent);
}

void PositionConfig::validate(Violations& v, const ShapeConfig& shape) const {
  const bool rope = position_embedding_type == PositionEmbedding::kRope;
  const int64_t channels = shape.kv_channels, width = rotary_width(shape);
  v.require(channels % 2 == 0 || !rope,
            cat("--kv-channels ", channels, " is odd, rotary embeddings need an even width"));
  v.require(rotary_percent > 0 && rotary_percent <= 1,
            cat("--rotary-percent ", rotary_percent, " is outside (0, 1]"));
  v.require(!rope || channels % 2 != 0 || width % 2 == 0,
            cat("--rotary-percent ", rotary_percent, " of --kv-channels ", channels, " rotates ",
                width, " features, an even number is needed"));
  v.require(rope_scaling_factor > 0,
            cat("--rope-scaling-factor ", rope_scaling_factor, " must be positive"));
  v.require(position_embedding_type != PositionEmbedding::kMrope,
            "--position-embedding-type mrope without --mrope-section",
            "three numbers, for example 16 24 24");
  v.require(mrope_section.empty() || (rope && rope_scaling_type == RopeScaling::kNone &&
                                      !rotary_interleaved && !rotary_base_local),
            "--mrope-section goes with --position-embedding-type mrope alone, without "
            "--rope-scaling-type, --rotary-interleaved and --rotary-base-local");
  int64_t pairs = 0;
  for (const int64_t section : mrope_section) pairs += section;
  v.require(mrope_section.empty() || (mrope_section.size() == 3 &&
                                      std::ranges::min(mrope_section) >= 0 && pairs == width / 2),
            cat("--mrope-section has ", mrope_section.size(), " values for ", pairs, " pairs"),
            cat("three numbers with the sum ", width / 2));
  validate_scaling(v, shape);
  v.require(!rotary_base_local || *rotary_base_local > 0,
            cat("--rotary-base-local ", rotary_base_local.value_or(0), " must be positive"));
  v.require(rotary_base > 0, cat("--rotary-base ", rotary_base, " must be positive"));
  v.require(!rotary_seq_len_interpolation_factor || *rotary_seq_len_interpolation_factor > 0,
            "--rotary-seq-len-interpolation-factor must be positive");
}

void PositionConfig::validate_scaling(Violations& v, const ShapeConfig& shape) const {
  const RopeScaling type = rope_scaling_type;
  v.require(type == RopeScaling::kNone || position_embedding_type == PositionEmbedding::kRope,
            "--rope-scaling-type has an effect only with --position-embedding-type rope");
  v.require(!use_rope_scaling || type == RopeScaling::kLlama3,
            "--use-rope-scaling means --rope-scaling-type llama3, but another type is given");
  v.require(rope_original_max_position_embeddings > 1,
            cat("--rope-original-max-position-embeddings ", rope_original_max_position_embeddings,
                " must be above 1"));
  v.require(type != RopeScaling::kLlama3 || rope_high_freq_factor > rope_low_freq_factor,
            cat("--rope-high-freq-factor ", rope_high_freq_factor,
                " must be above --rope-low-freq-factor ", rope_low_freq_factor));
  v.require(rope_low_freq_factor > 0,
            cat("--rope-low-freq-factor ", rope_low_freq_factor, " must be positive"));
  v.require(yarn_beta_fast > 0 && yarn_beta_slow > 0,
            "--yarn-beta-fast and --yarn-beta-slow must be positive");
  v.require(
      !rope_attention_factor || *rope_attention_factor > 0,
      cat("--rope-attention-factor ", rope_attention_factor.value_or(0), " must be positive"));
  v.require(!rope_attention_factor || type == RopeScaling::kYarn || type == RopeScaling::kLongRope,
            "--rope-attention-factor has an effect only with --rope-scaling-type yarn or longrope");
  const bool lists = !longrope_short_factor.empty() || !longrope_long_factor.empty();
  v.require(!lists || type == RopeScaling::kLongRope,
            "--longrope-short-factor and --longrope-long-factor have an effect only with "
            "--rope-scaling-type longrope");
  if (type != RopeScaling::kLongRope) return;
  const int64_t pairs = rotary_width(shape) / 2;
  for (const auto& [flag, list] : {std::pair{"--longrope-short-factor", &longrope_short_factor},
                                   std::pair{"--longrope-long-factor", &longrope_long_factor}}) {
    v.require(static_cast<int64_t>(list->size()) == pairs,
              cat(flag, " has ", list->size(), " values, expected one for each of the ", pairs,
                  " rotated pairs"));
    v.require(std::all_of(list->begin(), list->end(), [](double factor) { return factor > 0; }),
              cat(flag, " has a value that is not positive"));
  }
}

}  // namespace megatron
