#include "megatron/training/proving/routing_band.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/routing.h"

namespace megatron {
namespace {

// Of the largest error of one rank: a layout may round twice as much.
constexpr double kOfLargestError = 2;

// The same experts in any order
at::Tensor as_set(const at::Tensor& choices) { return std::get<0>(choices.sort(/*dim=*/1)); }

at::Tensor rows_that_differ(const at::Tensor& a, const at::Tensor& b) {
  return as_set(a).ne(as_set(b)).any(/*dim=*/1);
}

// Of each row: whether logits that are changed by up to `change` [n] in favour of `choices` [n, k]
// lead to them.
at::Tensor chosen_after(const at::Tensor& logits, const at::Tensor& bias, const at::Tensor& choices,
                        const at::Tensor& change, const RoutingOptions& options) {
  const at::Tensor favour = at::full_like(logits, -1).scatter_(1, choices, 1.0);
  const at::Tensor chosen = choose_experts(logits + favour * change.unsqueeze(1), bias, options);
  return rows_that_differ(chosen.to(at::kLong), choices).logical_not_();
}

// The largest over the rows of the least such change, by bisection; infinite where no change leads
// there.
double distance_from_tie(const at::Tensor& logits, const at::Tensor& bias,
                         const at::Tensor& choices, const RoutingOptions& options) {
  constexpr int kHalvings = 60;
  constexpr double kSaturation = 16;  // of scores, which a bias of the selection may outweigh
  at::Tensor above = std::get<0>(logits.max(1)) - std::get<0>(logits.min(1)) + kSaturation;
  if (!chosen_after(logits, bias, choices, above, options).all().item<bool>()) return HUGE_VAL;
  at::Tensor below = at::zeros_like(above);
  for (int i = 0; i < kHalvings; ++i) {
    const at::Tensor middle = (below + above) / 2;
    const at::Tensor enough = chosen_after(logits, bias, choices, middle, options);
    above = at::where(enough, middle, above);
    below = at::where(enough, below, middle);
  }
  return above.max().item<double>();
}

// One sample in one layer.
struct Sample {
  at::Tensor logits_of_layout, choices_of_layout, logits, choices, exact, bias;
};

// The rows of one layer and use.
class LayerOfRouters {
 public:
  explicit LayerOfRouters(const RoutingOptions& options) : options_(options) {}

  void add(const Sample& sample) {
    // Padding is not computed everywhere.
    const at::Tensor known = (sample.logits_of_layout + sample.logits + sample.exact)
                                 .isfinite()
                                 .all(1)
                                 .nonzero()
                                 .view({-1});
    if (known.numel() == 0) return;
    const auto rows = [&](const at::Tensor& all) { return all.index_select(0, known); };
    const at::Tensor exact = rows(sample.exact);
    largest_error_ =
        std::max(largest_error_, (rows(sample.logits) - exact).abs().max().item<double>());
    tokens_ += known.numel();
    const at::Tensor choices = rows(sample.choices_of_layout).to(at::kLong);
    const at::Tensor differing =
        rows_that_differ(choices, rows(sample.choices).to(at::kLong)).nonzero().view({-1});
    if (differing.numel() == 0) return;
    differing_ += differing.numel();
    distance_ =
        std::max(distance_, distance_from_tie(exact.index_select(0, differing), sample.bias,
                                              choices.index_select(0, differing), options_));
  }

  void report(const std::string& layer, RoutingComparison& out) const {
    out.comparisons.push_back(
        {Quantity::kRouting, 0,
         cat("choices of ", layer, ", ", differing_, " of ", tokens_, " differ"), distance_,
         kOfLargestError * largest_error_});
    out.tokens += tokens_;
    out.differing += differing_;
  }

 private:
  const RoutingOptions& options_;
  int64_t tokens_ = 0, differing_ = 0;
  double distance_ = 0, largest_error_ = 0;
};

}  // namespace

RoutingComparison compare_routing(const LogicalTensors& layout, const LogicalTensors& serial,
                                  const LogicalTensors& exact, const RoutingOptions& options) {
  constexpr std::string_view kLogits = " logits", kSample = " sample ";
  RoutingComparison out;
  std::map<std::string, LayerOfRouters> layers;
  for (const auto& [name, logits] : serial) {
    if (!name.ends_with(kLogits)) continue;
    const std::string place = name.substr(0, name.size() - kLogits.size()),
                      choices = place + " choices";
    if (!layout.contains(name)) {
      out.comparisons.push_back(
          {Quantity::kRouting, 0, "choices of " + place + " are missing", 1, 0});
      continue;
    }
    const auto bias = exact.find(place + " bias");
    layers.try_emplace(place.substr(0, place.find(kSample)), options)
        .first->second.add({layout.at(name), layout.at(choices), logits, serial.at(choices),
                            exact.at(name), bias == exact.end() ? at::Tensor() : bias->second});
  }
  for (const auto& [layer, rows] : layers) rows.report(layer, out);
  return out;
}

}  // namespace megatron
