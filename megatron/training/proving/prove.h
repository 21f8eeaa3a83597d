// Shows that a layout of ranks computes what one rank computes, for the user's own configuration.
//
// The configuration is shrunk to a tiny model of the same structure and trained by one rank and by
// the layout: in fp64, where only rounding of 1e-16 can differ; and in the run's own type, where
// the distance between one rank in that type and one rank in fp64 measures the rounding errors.
#pragma once

#include <string>
#include <vector>

#include "megatron/training/proving/equivalence.h"

namespace megatron {

// Tolerance in the run's own type, as a multiple of the distance between the one-rank runs in that
// type and in fp64.
inline constexpr double kRoundingBand = 4.0;
// Tolerance in fp64, relative to the quantity.
inline constexpr double kExactBand = 1e-9;

struct Shrunk {
  Arguments arguments;
  std::vector<std::string> changes;  // "--hidden-size 4096 -> 64", for the user
};

// A tiny configuration of the same structure: the number of layers is kept if the division over
// stages depends on it; heads, groups, features and sequence keep their divisibility by the ranks;
// axes of more than `max_axis` ranks are reduced. Data is synthetic.
Shrunk shrink(const Arguments& arguments, int64_t max_axis);

struct ProofLine {
  std::string quantity;  // "loss", "gradients", ...
  // The comparison nearest to its limit; with failures, the one farthest beyond it in the first
  // failing step
  std::string worst;
  int64_t compared = 0, failed = 0;
  double difference = 0;  // difference of `worst`
  double allowed = 0;
};

struct Proof {
  std::string dtype;             // "fp64", "bf16"
  std::vector<ProofLine> lines;  // loss, gradient norm, clip factor, gradients, updated weights
  std::vector<std::string> faults;
  bool holds() const;
};

// Runs `arguments` (from shrink()) on the CPU, with threads as ranks.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps);
// The same as one rank of a job of processes on `device`; the first rank gets the proofs, the
// others an empty list.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         const Job& job, c10::Device device);
// Whether every proof of the first rank holds; the same result on all ranks. Collective.
bool all_hold(const std::vector<Proof>& proofs, const Job& job);

// The same training on one rank.
Arguments serial_arguments(Arguments arguments);

}  // namespace megatron
