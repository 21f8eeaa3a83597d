// Proof that a layout of ranks trains the model that one rank trains, for the user's own
// configuration.
//
// The configuration is shrunk to a tiny model that keeps its structure, and run three times over:
// by one rank and by the layout, in fp64, where only rounding of 1e-16 can differ; and in the run's
// own type, where the distance between one rank in that type and one rank in fp64 says how large
// rounding is.
#pragma once

#include <string>
#include <vector>

#include "megatron/training/proving/equivalence.h"

namespace megatron {

// In the run's own type a difference may be this multiple of the distance between its serial run
// and the one in fp64.
inline constexpr double kRoundingBand = 4.0;
// In fp64, relative to the quantity itself.
inline constexpr double kExactBand = 1e-9;

struct Shrunk {
  Arguments arguments;
  std::vector<std::string> changes;  // "--hidden-size 4096 -> 64", for the user
};

// A tiny configuration of the same structure: layers are kept in number where the division over
// stages depends on them, heads, groups, features and sequence keep how they relate to the ranks,
// and axes of more than `max_axis` ranks are cut down. Data is made up.
Shrunk shrink(const Arguments& arguments, int64_t max_axis);

struct ProofLine {
  std::string quantity;  // "loss", "gradients", ...
  // The comparison that is nearest to its limit, or in the first step with failures farthest beyond
  // it
  std::string worst;
  int64_t compared = 0, failed = 0;
  double difference = 0;  // of the worst
  double allowed = 0;
};

struct Proof {
  std::string dtype;             // "fp64", "bf16"
  std::vector<ProofLine> lines;  // loss, gradient norm, clip factor, gradients, updated weights
  std::vector<std::string> faults;
  bool holds() const;
};

// Runs `arguments` (of shrink()) as threads on the CPU.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps);
// The same as one rank of a job of processes on `device`; the first rank gets the proof, the others
// nothing.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         const Job& job, c10::Device device);
// Whether every proof of the first rank holds, on all ranks. Collective.
bool all_hold(const std::vector<Proof>& proofs, const Job& job);

// The configuration of one rank that does the same work.
Arguments serial_arguments(Arguments arguments);

}  // namespace megatron
