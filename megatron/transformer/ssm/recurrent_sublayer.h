// A sublayer around a recurrence: norm, in_proj, what lies between, out_proj.
#pragma once

#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/saved_tensors.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/ssm/mixer_parts.h"

namespace megatron {

// Core: forward(mixed, pass), decode(mixed, state, batch) and norm_again(mixed, y, rstd) between
// the linears.
template <class Core>
class RecurrentSublayer : public Sublayer {
 public:
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override {
    const SublayerOutput projected = in_proj_.forward_with_residual(x);
    const at::Tensor& mixed = projected.output;
    at::Tensor o;
    std::optional<SavedTensorScope> saves_no_output;
    if (context.state != nullptr) {
      o = core_.decode(mixed, static_cast<RecurrentState&>(*context.state),
                       context.pass.decoding->batch);
    } else {
      MixerOutput result = core_.forward(mixed, context.pass);
      o = std::move(result.o);
      if (recomputes_norm_)
        saves_no_output.emplace(
            /*recomputing=*/true,
            [saved = o.detach(),
             again = recomputed([this, mixed = mixed.detach(), y = result.y, rstd = result.rstd] {
               return core_.norm_again(mixed, y, rstd);
             })](const at::Tensor& tensor) {
              return tensor.is_alias_of(saved) ? again : SavedTensorScope::Restore();
            });
    }
    if (add) return {out_proj_.forward(std::move(o), projected.residual), {}};
    return {out_proj_.forward(std::move(o)), projected.residual};
  }
  std::unique_ptr<LayerState> make_state() const override {
    return std::make_unique<RecurrentState>();
  }

 protected:
  // `parts`: the rows of in_proj, over all ranks. `width`: what out_proj reads. `norm_module`: what
  // the recomputation of the norm before it is called. The parameters are added by who derives.
  RecurrentSublayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                    const ParallelGroups& groups, const std::vector<int64_t>& parts, int64_t width,
                    const char* norm_module)
      : core_(config, groups),
        in_proj_("in_proj", config.hidden_size,
                 std::accumulate(parts.begin(), parts.end(), int64_t{0}),
                 in_proj_options(config, layer_number, sequence_parallel, parts), groups),
        out_proj_("out_proj", width, config.hidden_size,
                  out_proj_options(config, layer_number, sequence_parallel, width), groups),
        recomputes_norm_(config.recomputes(norm_module)) {}

  Core core_;
  ColumnParallelLinear in_proj_;
  RowParallelLinear out_proj_;

 private:
  const bool recomputes_norm_;
};

}  // namespace megatron
