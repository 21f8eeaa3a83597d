// A tiny transformer of the same structure: the one on which `prove` compares ranks with one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// Products in a proof have sizes of whole tiles: 1; quantised ones, 32; with scales of blocks, one
// block.
int64_t product_tile(const TransformerConfig& config);

// Changes values and says what it changed, "--hidden-size 4096 -> 64", and what structure was lost.
class Shrinker {
 public:
  Shrinker(std::vector<std::string>& changes, std::vector<std::string>& lost)
      : changes_(changes), lost_(lost) {}
  void set(const char* flag, int64_t& value, int64_t to);
  void set(const char* flag, std::optional<int64_t>& value, int64_t to);
  void set(const char* flag, bool& value, bool to);
  void note(std::string change) { changes_.push_back(std::move(change)); }
  // For something of which code can tell only one from several: lost if several became one.
  void keep_several(const char* what, int64_t before, int64_t after);
  void lose(std::string what) { lost_.push_back(std::move(what)); }

 private:
  std::vector<std::string>& changes_;
  std::vector<std::string>& lost_;
};

// A number of which code can tell only one from several.
inline int64_t one_or_several(int64_t count) { return count < 2 ? count : 2; }

// Ranks that divide a layer.
struct ProofRanks {
  int64_t tensor = 1, context = 1;
  int64_t inner_context = 1;  // exchange heads for tokens with a2a+p2p
  int64_t samples = 1;        // of a micro-batch, whose tokens context ranks divide
};

// Sizes of a layer and of its sequence. Where the model has several groups of keys and values per
// tensor rank, several heads per group, groups that tensor ranks share, or groups that an
// all-to-all over context ranks copies or deals out, so has the tiny one; values of multi-latent
// attention stay narrower or wider than its keys; a window keeps its part of the sequence. With
// scales of blocks every product of a rank has whole blocks, and the residual stream is one wide.
void shrink_layer(TransformerConfig& config, const ProofRanks& before, const ProofRanks& ranks,
                  Shrinker& shrinker);

// The same of experts. Where the model has several experts per rank, several choices, groups of
// which some are not chosen, or several scores that rank a group, so has the tiny one.
struct ExpertProofRanks {
  int64_t expert = 1, expert_tensor = 1, tensor = 1;
};
void shrink_experts(TransformerConfig& config, const TransformerConfig& before,
                    const ExpertProofRanks& ranks_before, const ExpertProofRanks& ranks,
                    Shrinker& shrinker);

// Removes balancing of experts that depends on the layout by definition, so that no run on one rank
// computes the same.
struct BalancedRows {
  int64_t parts = 1;       // ranks that divide the rows of a micro-batch
  int64_t data_ranks = 1;  // with micro-batches of their own
  bool per_token = true;   // losses are means over all tokens of a step
};
void remove_balance_by_rank(TransformerConfig& config, const BalancedRows& rows,
                            Shrinker& shrinker);

// `segments`, on that many pipeline stages, divide the layers evenly. The smallest depth of at
// least two layers each at which every segment has each kind of layer that it had (letters, window,
// exchange of context ranks, quantisation), some segment still has other kinds than the first one,
// the one before it and the chunk before it on its stage if one had, and recomputation has a
// remainder if it had one; the depth as it is if there is no smaller one.
void shrink_depth(TransformerConfig& config, int64_t segments, int64_t stages, Shrinker& shrinker);

// Mamba-2 layers: several heads and groups per tensor rank, several heads per group and several
// ranks that share a group where the model has them.
void shrink_mamba(TransformerConfig& config, int64_t tensor_before, int64_t tensor,
                  Shrinker& shrinker);

// Gated delta nets: several heads of keys per tensor rank, and several of values for each.
void shrink_gated_delta(TransformerConfig& config, int64_t tensor_before, int64_t tensor,
                        Shrinker& shrinker);

// As shrink_depth() for a hybrid model, whose pattern has so many layers in each segment: the
// shortest pattern with `|` whose segments begin and end with the letters that they began and ended
// with and have every pair of neighbours that they had. Where more than letters tells layers apart,
// all stay.
void shrink_pattern(TransformerConfig& config, const std::vector<int64_t>& segments,
                    Shrinker& shrinker);

// What a sample of a tiny model passes through, and how long it is. In layers that take as long:
// the ends of the model are one, latent attention makes two of one, experts add two.
struct SampleSize {
  int64_t layers = 0, tokens = 0;
};
SampleSize sample_size(const TransformerConfig& config);

// Every part of a tiny model affects the loss.
void shrink_weights(TransformerConfig& config);

}  // namespace megatron
