// What is said of layers without kernels.
#include "megatron/transformer/ssm/reference_notes.h"

#include <gmock/gmock.h>

#include "tests/unit/transformer/ssm/mixer_config.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A layer of Nemotron-H 8B.
TransformerConfig large() {
  TransformerConfig config = mixer_config(128, 8);
  config.hidden_size = 4096;
  config.mamba_head_dim = 64;
  config.mamba_state_dim = 128;
  return config;
}

std::vector<std::string> decoding(const TransformerConfig& config, int64_t t = 1) {
  return reference_notes(config, t, at::kBFloat16, /*scans=*/true, /*training=*/false);
}

TEST(ReferenceNotes, OfMamba) {
  EXPECT_THAT(decoding(large()), IsEmpty());
  EXPECT_THAT(decoding(large(), 8), IsEmpty());
  EXPECT_THAT(reference_notes(large(), 1, at::kBFloat16, true, /*training=*/true), IsEmpty());
  TransformerConfig wide = large();
  wide.mamba_state_dim = 256;
  EXPECT_THAT(reference_notes(wide, 1, at::kBFloat16, true, /*training=*/true),
              ElementsAre("the scan's backward of Mamba-2 layers runs as tensor operations: its "
                          "kernel takes states of 64 and 128, not 256"));
  EXPECT_THAT(reference_notes(large(), 1, at::kBFloat16, /*scans=*/false, false),
              ElementsAre(HasSubstr("the scan of Mamba-2 layers runs as tensor operations: its "
                                    "kernel is for Hopper GPUs")));
  EXPECT_THAT(reference_notes(large(), 1, at::kFloat, true, true),
              ElementsAre(HasSubstr("kernels are for bf16")));
  // Heads of 2 and states of 8: only the convolution's channels fit.
  EXPECT_THAT(decoding(mixer_config(8, 2)),
              ElementsAre(HasSubstr("the scan of Mamba-2 layers runs as tensor operations: its "
                                    "kernel takes heads of 64 and 128 and states of 64, 128 and "
                                    "256, not heads of 2 and states of 8"),
                          HasSubstr("the decoding step of Mamba-2 layers")));
  TransformerConfig odd = large();
  odd.mamba_num_heads = 130;
  odd.mamba_num_groups = 1;
  EXPECT_THAT(decoding(odd), ElementsAre(HasSubstr("groups of multiples of 8 channels up to 8192, "
                                                   "not 8320")));
  odd.layer_pattern = "*-";
  EXPECT_THAT(decoding(odd), IsEmpty());
}

TEST(ReferenceNotes, OfGatedDeltaNets) {
  TransformerConfig config;
  config.num_layers = 1;
  config.layer_pattern = "G";
  const auto notes = [&](bool scans, bool training) {
    return reference_notes(config, 1, at::kBFloat16, scans, training);
  };
  EXPECT_THAT(decoding(config),
              ElementsAre("the decoding step of gated delta nets runs as tensor operations: it "
                          "has no kernel"));
  EXPECT_THAT(notes(true, /*training=*/true), IsEmpty());
  EXPECT_THAT(notes(/*scans=*/false, true),
              ElementsAre(HasSubstr("the delta rule of gated delta nets runs as tensor operations: "
                                    "its kernel is for Hopper GPUs")));
  config.linear_value_head_dim = 64;
  EXPECT_THAT(notes(true, true),
              ElementsAre(HasSubstr("the delta rule's backward of gated delta nets runs as tensor "
                                    "operations: its kernel takes keys and values of one size, "
                                    "not 128 and 64")));
  config.linear_chunk_size = 96;
  EXPECT_THAT(notes(true, true), ElementsAre(HasSubstr("chunks of multiples of 64 rows, not 96")));
  config.linear_key_head_dim = 32;
  config.linear_value_head_dim = 36;
  EXPECT_THAT(notes(true, true),
              ElementsAre(HasSubstr("the delta rule of gated delta nets runs as tensor "
                                    "operations: its kernel takes heads of 64 and 128, not 32 and "
                                    "36"),
                          HasSubstr("the norm and gate of gated delta nets")));
  config = {};
  config.num_layers = 1;
  config.layer_pattern = "G";
  config.linear_conv_kernel_dim = 5;
  EXPECT_THAT(decoding(config)[0], HasSubstr("2 to 4 tokens, not 8192 and 5"));
}

}  // namespace
}  // namespace megatron
