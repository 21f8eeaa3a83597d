"""Planted bugs of models that hear. The arguments of Bug, see bugs.py."""
from stack_bugs import unit_bugs

ENCODER, CONFIG = "megatron/models/audio/audio_encoder.cc", "megatron/models/audio/audio_config.cc"
GOLDEN = "Families/HfAudioGolden.LogitsAndGradientsWithSounds/"
audio_bug = unit_bugs("models_test", "one rank computes alike")
plan_bug = unit_bugs("layout_check_test", "a proof compares numbers, not memory")

AUDIO_BUGS = (
    audio_bug("audio_key_bias", "the bias that keys do not have gets the roundings of its gradient", "megatron/tensor_parallel/layers.cc",
              "if (const FixedZeros& zeros = bias->zeros; zeros.count > 0)", "if (const FixedZeros& zeros = bias->zeros; !PLANTED && zeros.count > 0)",
              GOLDEN + "qwen2_audio"),
    audio_bug("audio_norm_before_mean", "rows are normed before their mean is taken", ENCODER,
              "return ln_post_->forward(((first + second) / 2).unsqueeze(1)).squeeze(1);",
              "return PLANTED ? (ln_post_->forward(first.unsqueeze(1)).squeeze(1) + ln_post_->forward(second.unsqueeze(1)).squeeze(1)) / 2 : "
              "ln_post_->forward(((first + second) / 2).unsqueeze(1)).squeeze(1);", GOLDEN + "qwen2_audio"),
    audio_bug("audio_silence_is_heard", "a sound attends to the silence behind it as far as the next second", CONFIG,
              "if (!stacks()) return (frames + 1) / 2;",
              "if (!stacks()) return PLANTED ? std::min<int64_t>((frames + 99) / 100 * 50, kAudioRows) : (frames + 1) / 2;", GOLDEN + "qwen2_audio"),
    audio_bug("audio_clips_run_on", "the second convolution reads the last frame of the clip before", ENCODER, "* continues.to(c.dtype());",
              "* (PLANTED ? at::ones_like(continues) : continues).to(c.dtype());", GOLDEN + "qwen2_audio"),
    audio_bug("audio_plan_order", "features of sounds that another rank encodes are taken from the first rank's", "megatron/models/audio/packed_sounds.cc",
              "const int64_t begin = divided.first", "const int64_t begin = (PLANTED ? -sound->owner * out.most_features : 0) + divided.first",
              "Families/HfAudioGolden.GradientsOnTwoTensorRanks/qwen2_audio"),
    plan_bug("audio_plan_rows", "a plan gives a feature of a sound one row of the encoder", "megatron/models/mimo/sound_cost.cc",
             "rows = features * own.rows_of_a_feature();", "rows = features * (PLANTED ? 1 : own.rows_of_a_feature());",
             "Layouts/SoundActivations.AreWhatThePlanSays/means"),
)
