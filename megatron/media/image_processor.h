// From an image to the pictures that an encoder reads, as the image processors of transformers make
// them, from their configuration.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/media/pixel_values.h"
#include "megatron/media/resample.h"
#include "megatron/media/tiling.h"

namespace megatron {

// What preprocessor_config.json says, with the defaults of its class.
struct ImageProcessorConfig {
  enum class Kind {
    kPlain,      // CLIP, LLaVA, SigLIP: to a size, perhaps a crop
    kLlavaNext,  // the whole image and tiles of the best resolution
    kInternVl,   // tiles of the closest grid, and the whole image last
    kGemma3,     // the whole image, and pictures along its longer side
    kQwen2Vl,    // its own size, in patches
  };
  Kind kind = Kind::kPlain;
  std::string type;  // "CLIPImageProcessor"
  PixelScaling scaling;
  Resampling filter = Resampling::kBicubic;
  // Plain: the shorter side becomes shortest_edge, or the image `size`. Others: a tile's size.
  int64_t shortest_edge = 0;
  ImageSize size;
  std::optional<ImageSize> crop;  // of the centre, zeros around what is smaller
  bool pad_to_square = false;     // before all else, with the mean's colour
  std::vector<ImageSize> pinpoints;
  int64_t min_tiles = 1, most_tiles = 12;
  bool use_tiles = false;      // InternVL: crop_to_patches
  bool use_thumbnail = true;   // InternVL
  bool area_weighted = false;  // InternVL: Megatron's other choice of the grid
  std::optional<PanAndScan> pan_and_scan;
  int64_t min_pixels = 0, most_pixels = 0;  // Qwen
  int64_t patch = 14, merge = 2, frames = 2;
};

// Reads the text of preprocessor_config.json, or of processor_config.json, whose member
// image_processor counts. Keys that are absent have the defaults of the class; a key that is not
// known, or asks for pixels that are not built, is an Error that names it. `where` is the file.
ImageProcessorConfig read_image_processor(std::string_view text, const std::string& where);

// One picture that an encoder reads: a rectangle of the image, resized, of which `keep` is pasted
// into zeros.
struct PicturePlan {
  ImageBox source;
  ImageSize resized;
  ImageBox keep;  // of the resized rectangle; empty: nothing of the image is in this picture
  ImageSize size;
  int64_t top = 0, left = 0;  // where `keep` begins in the picture
};

struct ImagePlan {
  // The image's place in a larger one of the mean's colour, where it is padded first.
  std::optional<ImageBox> square;
  std::vector<PicturePlan> pictures;  // in the order in which encoders read them
  TileGrid grid;                      // of tiles, where there are tiles
};

// What process_image() will make of an image of a size.
ImagePlan plan_image(const ImageProcessorConfig& config, ImageSize image);

std::vector<Image> process_image(const ImageProcessorConfig& config, const Image& image);

// The bytes of an image's patches, [patches, 3, frames, patch, patch]: in blocks of merge x merge
// patches, blocks and patches in them row by row; the still image is repeated along the frames. The
// sides are multiples of patch * merge.
std::vector<uint8_t> patch_bytes(const Image& image, int64_t patch, int64_t merge = 1,
                                 int64_t frames = 1);

}  // namespace megatron
