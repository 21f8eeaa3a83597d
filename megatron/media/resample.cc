#include "megatron/media/resample.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/media/detail/resample_passes.h"

namespace megatron {
namespace {

// Weights of so many taps are in memory at a time: those of a row of 80 million pixels would take
// gigabytes.
constexpr int64_t kTapsAtATime = 1 << 18;

// Calls use(weights, first output) for outputs [begin, begin + count) of an axis, in blocks.
template <class Use>
void for_blocks(int64_t from, int64_t to, Resampling filter, int64_t begin, int64_t count,
                const Use& use) {
  const int64_t block = std::max<int64_t>(1, kTapsAtATime / media::most_taps(from, to, filter));
  for (int64_t i = 0; i < count; i += block)
    use(media::axis_weights(from, to, filter, begin + i, std::min(block, count - i)), i);
}

// Which inputs the outputs [begin, begin + count) of an axis need.
struct Range {
  int64_t begin = 0, end = 0;
};
Range needed(int64_t from, int64_t to, Resampling filter, int64_t begin, int64_t count) {
  if (from == to) return {begin, begin + count};
  const media::AxisWeights last = media::axis_weights(from, to, filter, begin + count - 1, 1);
  return {media::axis_weights(from, to, filter, begin, 1).first[0], last.first[0] + last.taps[0]};
}

// Rows `rows` of the image, filtered along x to columns [left, left + width) of `to_width`.
Image resized_along_rows(const Image& image, Range rows, int64_t to_width, Resampling filter,
                         int64_t left, int64_t width) {
  const ImageSize size = {rows.end - rows.begin, width};
  if (to_width == image.width()) return crop(image, {rows.begin, left, size});
  Image out(size);
  for_blocks(image.width(), to_width, filter, left, width,
             [&](const media::AxisWeights& weights, int64_t x) {
               const media::RowPass pass(weights);
               for (int64_t y = 0; y < size.height; ++y)
                 pass.run(image.row(rows.begin + y), out.row(y) + 3 * x);
             });
  return out;
}

// Rows [top, top + height) of `to_height`, filtered along y from `from_height` rows, of which
// `image` holds those from `first_row` on that are needed.
Image resized_along_columns(const Image& image, int64_t first_row, int64_t from_height,
                            int64_t to_height, Resampling filter, int64_t top, int64_t height) {
  const ImageSize size = {height, image.width()};
  if (to_height == from_height) return crop(image, {top - first_row, 0, size});
  Image out(size);
  for_blocks(from_height, to_height, filter, top, height,
             [&](const media::AxisWeights& weights, int64_t y) {
               for (int64_t i = 0; i < weights.count(); ++i)
                 media::column_sums(image.row(weights.first[i] - first_row), image.row_bytes(),
                                    weights.of(i), weights.taps[i], out.row_bytes(),
                                    out.row(y + i));
             });
  return out;
}

}  // namespace

Image resized(const Image& image, ImageSize size, Resampling filter, std::optional<ImageBox> keep) {
  MEGATRON_ASSERT(size.height > 0 && size.width > 0, "a size of ", size.height, "x", size.width);
  const ImageBox box = keep.value_or(ImageBox{0, 0, size});
  MEGATRON_ASSERT(box.top >= 0 && box.left >= 0 && box.size.height > 0 && box.size.width > 0 &&
                      box.top + box.size.height <= size.height &&
                      box.left + box.size.width <= size.width,
                  "a rectangle outside of the resized image");
  const auto [height, width] = image.size();
  if (height > 100 * width && size.height < height) {
    // Such an image is at most a hundredth as wide as high: all of its columns are filtered.
    const Image middle =
        resized_along_columns(image, 0, height, size.height, filter, box.top, box.size.height);
    return resized_along_rows(middle, {0, box.size.height}, size.width, filter, box.left,
                              box.size.width);
  }
  const Range rows = needed(height, size.height, filter, box.top, box.size.height);
  const Image middle =
      resized_along_rows(image, rows, size.width, filter, box.left, box.size.width);
  return resized_along_columns(middle, rows.begin, height, size.height, filter, box.top,
                               box.size.height);
}

}  // namespace megatron
