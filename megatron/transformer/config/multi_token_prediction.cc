#include "megatron/transformer/config/multi_token_prediction.h"

#include "megatron/base/check.h"

namespace megatron {

void MultiTokenPredictionConfig::fields(FieldVisitor& v) {
  v.group("multi-token prediction");
  v.role(FieldRole::kArchitecture);
  v.field("mtp_num_layers", mtp_num_layers,
          "layers after the decoder, each of which predicts one more token ahead, as DeepSeek-V3 "
          "is trained; 0: none");
  v.field("mtp_use_repeated_layer", mtp_use_repeated_layer,
          "one layer with one set of weights for all of --mtp-num-layers");
  v.role(FieldRole::kNumerics);
  v.field("mtp_loss_scaling_factor", mtp_loss_scaling_factor,
          "weight of the mean of the losses of --mtp-num-layers next to the main loss");
}

void MultiTokenPredictionConfig::validate(Violations& v, const ShapeConfig& shape) const {
  v.require(mtp_num_layers >= 0, cat("--mtp-num-layers ", mtp_num_layers, " is negative"),
            "0: none");
  v.require(mtp_num_layers <= 0 || mtp_num_layers + 1 < shape.seq_length,
            cat("--mtp-num-layers ", mtp_num_layers, " predict up to ", mtp_num_layers + 1,
                " tokens ahead in sequences of ", shape.seq_length));
  v.require(mtp_loss_scaling_factor > 0,
            cat("--mtp-loss-scaling-factor ", mtp_loss_scaling_factor, " must be positive"),
            "to train without multi-token prediction leave --mtp-num-layers out");
  v.require(!mtp_use_repeated_layer || mtp_num_layers > 1,
            "--mtp-use-repeated-layer has an effect only with several --mtp-num-layers");
  v.require(mtp_num_layers > 0 ||
                mtp_loss_scaling_factor == MultiTokenPredictionConfig().mtp_loss_scaling_factor,
            "--mtp-loss-scaling-factor has an effect only with --mtp-num-layers");
}

}  // namespace megatron
