#include "megatron/training/pipeline.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/layer_division.h"

namespace megatron {

Pipeline::Pipeline(const PipelineConfig& config, StageLayout layout, const ParallelGroups& groups,
                   at::ScalarType dtype, at::Device device, const EncoderRanks& encoder,
                   const Mesh& language)
    : config_(config),
      dtype_(dtype),
      device_(device),
      stage_(groups.pp.rank()),
      num_stages_(groups.pp.size()),
      scheduled_(std::move(layout)),
      layout_(encoder.any()
                  ? layout_of_module(scheduled_, encoder.holds(groups.world.rank()), config)
                  : scheduled_) {
  if (encoder.any())
    encoder_links_ = std::make_unique<EncoderLinks>(groups.world, encoder, language, device);
  needs_warm_up_ = num_stages_ > 1 || encoder.any();
  forward_needs_warm_up_ = needs_warm_up_ && splits_vocabulary();
  if (encodes()) return;
  links_ = std::make_unique<PipelineLinks>(
      groups.pp, planned(num_stages_, /*training=*/false).schedule, device,
      config_.overlap_p2p_communication, &groups.model_parallel);
}

const Pipeline::Planned& Pipeline::planned(int num_microbatches, bool training) {
  const auto [found, inserted] = planned_.try_emplace({num_microbatches, training});
  if (inserted) {
    const ScheduleShape shape = config_.shape(scheduled_, num_microbatches);
    Schedule schedule = training ? make_schedule(config_.pipeline_schedule, shape)
                                 : make_forward_schedule(config_.pipeline_schedule, shape);
    if (encodes()) {
      found->second = {encoder_schedule(schedule), {}};
      return found->second;
    }
    auto transfers = plan_transfers(schedule);
    found->second = {std::move(schedule), std::move(transfers[static_cast<size_t>(stage_)])};
  }
  return found->second;
}

TensorFormats Pipeline::format(const Model& model, Border border, const Batch& batch) const {
  const StageSlice& slice = model.slice();
  const int64_t before = border == Border::kInput    ? slice.layers_before()
                         : border == Border::kOutput ? slice.layers_through()
                                                     : layout_.num_layers();
  return model.border(before, batch, dtype_);
}

void Pipeline::run(int num_microbatches, bool training, StageCompute& compute) {
  const Planned& plan = planned(num_microbatches, training);
  if (encoder_links_ == nullptr || !encoder_links_->any())
    return run_pipeline(plan.schedule, plan.transfers, compute, *links_, device_);
  if (encoder_links_->encodes()) return run_encoders(plan.schedule, compute, *encoder_links_);
  BehindEncoders behind(compute, *encoder_links_);
  run_pipeline(plan.schedule, plan.transfers, behind, *links_, device_);
  encoder_links_->settle();
}

}  // namespace megatron
