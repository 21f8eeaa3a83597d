// Whether the gradients of a layout in the run's own type differ from those of one rank by more
// than rounding.
//
// Several steps run, each on other samples and on other initial weights: one rounding of quantised
// weights would scale the gradients of all steps alike. For each parameter and step three
// gradients are known: of one rank in fp64 on the same rounded weights (E, exact), of one rank in
// the own type (S), and of the layout in the own type (L).
//
//   bias   sum <L - S, E> / sum <E, E> over the steps, each divided by <E, E> and its median over
//          the steps: the factor by which the layout scales the gradient, minus one. Rounding
//          errors have no preferred sign: the bias is 0 up to its standard error, which follows
//          from leaving out each step.
//   noise  sqrt(sum |L - E|^2 / sum |S - E|^2) over the steps: how much more the layout rounds.
//
// The limits are fitted to the distributions over random layouts; see docs/parallelism/proving.md.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "megatron/training/proving/equivalence.h"

namespace megatron {

// Steps of the traces: usually, at least, and in a thorough proof.
inline constexpr int kRoundingSteps = 64, kFewestRoundingSteps = 16, kThoroughSteps = 512;

// A gradient whose rounding errors hide a bias of 1%.
struct HiddenBias {
  std::string name;    // "gradient of decoder.layers.0..."
  double visible = 0;  // a bias of this size would be seen
};

struct RoundingComparison {
  std::vector<Comparison> comparisons;  // "bias of the gradient of ...", "noise of ...", states
  std::vector<HiddenBias> hidden;
};

// The standard errors from zero that rounding reaches once in ten million times, of a mean over
// `steps` steps whose standard error is itself taken from them: a quantile of Student's t.
double standard_errors(size_t steps);

struct RoundingOptions {
  c10::ScalarType dtype;
  // Every sum has the order that it has on one rank: states of delayed scaling are equal in bits,
  // and compared.
  bool one_order = false;
};

// Compares traces of the same steps without updates.
RoundingComparison compare_rounding(const TrainingTrace& layout, const TrainingTrace& serial,
                                    const TrainingTrace& exact, const RoundingOptions& options);

}  // namespace megatron
