#include "megatron/training/pipeline.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

Pipeline::Pipeline(const Arguments& arguments, const ParallelGroups& groups, at::ScalarType dtype,
                   at::Device device)
    : config_(arguments.pipeline),
      hidden_size_(arguments.transformer.hidden_size),
      rows_divisor_(arguments.parallel.sequence_parallel ? groups.tp.size() : 1),
      dtype_(arguments.transformer.fp32_residual_connection && dtype != at::kDouble ? at::kFloat
                                                                                    : dtype),
      device_(device),
      stage_(groups.pp.rank()),
      num_stages_(groups.pp.size()),
      layout_(make_stage_layout(config_, num_stages_, arguments.transformer.num_layers)) {
  needs_warm_up_ = num_stages_ > 1;
  forward_needs_warm_up_ = needs_warm_up_ && splits_vocabulary();
  links_ =
      std::make_unique<PipelineLinks>(groups.pp, schedule(num_stages_, /*training=*/false), device,
                                      config_.overlap_p2p_communication, &groups.model_parallel);
}

const Schedule& Pipeline::schedule(int num_microbatches, bool training) {
  const auto [found, inserted] = schedules_.try_emplace({num_microbatches, training});
  if (inserted) {
    const ScheduleShape shape = config_.shape(num_stages_, num_chunks(), num_microbatches);
    found->second = training ? make_schedule(config_.pipeline_schedule, shape)
                             : make_forward_schedule(config_.pipeline_schedule, shape);
  }
  return found->second;
}

void Pipeline::run(int num_microbatches, bool training, StageCompute& compute,
                   const std::function<TokenPositions(int microbatch)>& place_of) {
  TransferFormat format;
  format.dtype = dtype_;
  format.device = device_;
  format.shape_of = [&](int microbatch) {
    const TokenPositions place = place_of(microbatch);
    const auto [rows, hidden_size] = activation_shape(place);
    return std::vector<int64_t>{rows, place.sample.size(0), hidden_size};
  };
  run_pipeline(schedule(num_microbatches, training), compute, *links_, format);
}

}  // namespace megatron
