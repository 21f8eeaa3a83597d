// Shows that a layout of ranks computes what one rank computes, for the user's own configuration.
//
// The configuration is shrunk to a tiny model of the same structure and trained by one rank and by
// the layout: in fp64, where only rounding of 1e-16 can differ; and in the run's own type, where
// errors are told from rounding by their mean over many samples (rounding_band.h). What follows the
// backward in the own type runs on given gradients that no sum rounds (exact_update.h).
#pragma once

#include <string>
#include <vector>

#include "megatron/training/proving/equivalence.h"
#include "megatron/training/proving/rounding_band.h"

namespace megatron {

// Tolerance in fp64, relative to the quantity.
inline constexpr double kExactBand = 1e-9;

struct Shrunk {
  Arguments arguments;
  std::vector<std::string> changes;  // "--hidden-size 4096 -> 64", for the user
  // Structure that the tiny one does not have: "1 tensor ranks, 8 in the model"
  std::vector<std::string> lost;
};

// A tiny configuration of the same structure (docs/parallelism/proving.md): the number of layers is
// kept if the division over stages depends on it; kinds of layers keep their places, heads and
// groups their relation to the ranks, gradients their buckets; axes of more than `max_axis` ranks
// are reduced; the schedules of the run fit into `num_steps`. Data is synthetic.
// `on_gpu` keeps the device and, for the run's own type, CUDA graphs; else ranks are on the CPU.
Shrunk shrink(const Arguments& arguments, int64_t max_axis, int num_steps = 3, bool on_gpu = false);

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
  std::string claim;             // "exact up to 1e-9"
  std::vector<ProofLine> lines;  // by Quantity, those that were compared
  std::vector<std::string> faults;
  std::vector<HiddenBias> hidden;
  std::vector<std::string> not_proved;  // other quantities, and why
  // Of routers in the run's own type: tokens, over all layers, and those that they would send to
  // other experts than one rank, within rounding of a tie (routing_band.h)
  int64_t routed_tokens = 0, routed_otherwise = 0;
  bool holds() const;
};

// Runs `arguments` (from shrink()) on the CPU, with threads as ranks. The own type is traced over
// as many steps as take some seconds; `thorough`: over kThoroughSteps, which see smaller errors.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         bool thorough = false);
// The same as one rank of a job of processes on `device`; the first rank gets the proofs, the
// others an empty list.
std::vector<Proof> prove(const PretrainTask& task, const Arguments& arguments, int num_steps,
                         const Job& job, c10::Device device, bool thorough = false);
// The third proof alone, which needs no passes.
Proof prove_updates(const PretrainTask& task, const Arguments& arguments);
// Whether every proof of the first rank holds; the same result on all ranks. Collective.
bool all_hold(const std::vector<Proof>& proofs, const Job& job);

// The same training on one rank.
Arguments serial_arguments(Arguments arguments);

}  // namespace megatron
