#include "megatron/models/mimo/media_cost.h"

namespace megatron {
namespace {

// Attention segments: their rows, and the squares of these, summed.
struct SegmentSums {
  int64_t rows = 0, squares = 0;
};

SegmentSums equal_sums(int64_t segments, int64_t rows) {
  return {segments * rows, segments * rows * rows};
}

// Of the parts of n that are `side` long, the last one perhaps shorter: their squares, summed.
int64_t squares_of_parts(int64_t n, int64_t side) {
  return n / side * side * side + n % side * (n % side);
}

int64_t cost_of_layer(const SegmentSums& of, int64_t h, int64_t mlp_products) {
  return of.rows * (4 * h * h + mlp_products) + 2 * h * of.squares;
}

}  // namespace

int64_t encoding_cost(const MimoConfig& own, const SampleImage& image) {
  const int64_t h = own.vision_hidden_size,
                gated = own.vision_activation == VisionActivation::kSilu ? 1 : 0,
                mlp = (2 + gated) * h * own.vision_ffn_hidden_size,
                rows = own.has_own_sizes() ? image.rows * image.columns : own.encoder_rows(),
                whole = own.has_windows() ? std::ssize(own.vision_whole_picture_layers)
                                          : own.vision_num_layers;
  const SegmentSums pictures = equal_sums(image.pictures, rows);
  int64_t cost = whole * cost_of_layer(pictures, h, mlp);
  if (own.has_windows()) {  // of blocks of two by two patches
    const int64_t side = own.window_side();
    const SegmentSums windows = {pictures.rows, image.pictures * 16 *
                                                    squares_of_parts(image.rows / 2, side) *
                                                    squares_of_parts(image.columns / 2, side)};
    cost += (own.vision_num_layers - whole) * cost_of_layer(windows, h, mlp);
  }
  return own.frozen_vision ? cost : 3 * cost;
}

int64_t encoding_cost(const MimoConfig& own, const SampleSound& sound) {
  const int64_t h = own.audio_hidden_size, mlp = 2 * h * own.audio_ffn_hidden_size;
  const SegmentSums clips = equal_sums(sound.clips, sound.frames_of_clip / 2);
  const int64_t cost = own.audio_num_layers * cost_of_layer(clips, h, mlp);
  return own.frozen_audio ? cost : 3 * cost;
}

MediaCosts media_costs(const MimoConfig& own) {
  return {.image = [own](const SampleImage& image) { return encoding_cost(own, image); },
          .sound = [own](const SampleSound& sound) { return encoding_cost(own, sound); }};
}

}  // namespace megatron
