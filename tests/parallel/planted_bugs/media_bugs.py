"""Planted bugs of images and sound, which goldens and unit tests catch: what comes before a model. The arguments of Bug, see bugs.py."""
from stack_bugs import unit_bugs

media_bug = unit_bugs("media_test", "files are read before any layout", "megatron/media/")


MEDIA_BUGS = (
    media_bug("media_sideways", "a photograph lies as the camera stored it", "decode.cc",
              "return oriented(std::move(image), header.orientation);", "return oriented(std::move(image), PLANTED ? 1 : header.orientation);",
              "Decode.OrientationComesBeforeTheSize"),
    media_bug("media_plain_upsampling", "chroma of JPEG is widened without smoothing", "library/read_jpeg.cc",
              "info.dct_method = JDCT_ISLOW;", "info.dct_method = JDCT_ISLOW;\n  if (PLANTED) info.do_fancy_upsampling = FALSE;",
              "Decode.EveryModeDepthAndOrientationIsPillows"),
    media_bug("media_invented_pixels", "damaged JPEG data are gone on from", "library/read_jpeg.cc",
              "if (level >= 0) return;", "if (PLANTED || level >= 0) return;", "Decode.DamagedDataAreNamed"),
    media_bug("media_columns_first", "every image is filtered along its columns first", "resample.cc",
              "if (height > 100 * width && size.height < height) {", "if (PLANTED || (height > 100 * width && size.height < height)) {",
              "Resample.PartsOfDrawnImagesArePillows"),
    media_bug("media_tall_rows_first", "images more than 100 times as high as wide are filtered along their rows first, too", "resample.cc",
              "(height > 100 * width && size.height < height)", "(!PLANTED && height > 100 * width && size.height < height)",
              "Resample.PartsOfDrawnImagesArePillows"),
    media_bug("media_scale_folded", "1/255 is folded into mean and deviation", "pixel_values.cc",
              "table[channel][v] =", "table[channel][v] = PLANTED ? (static_cast<float>(v) - mean * 255) / (deviation * 255) :",
              "PixelValues.EveryBitOfTheTablesIsRight"),
    media_bug("media_halves_from_zero", "halves of Qwen's sizes are rounded away from zero", "tiling.cc",
              "{multiple(std::nearbyint(real(height) / f)),",
              "{multiple(PLANTED ? std::round(real(height) / f) : std::nearbyint(real(height) / f)),", "Tiling.SmartSize"),
    media_bug("media_sides_exchanged", "height and width are exchanged where tokens of LLaVA-NeXT are counted", "tiling.cc",
              "return side * side + kept.height * (kept.width + 1);",
              "return side * side + (PLANTED ? kept.width * (kept.height + 1) : kept.height * (kept.width + 1));", "Tiling.LlavaNext"),
    media_bug("media_thumbnail_first", "the whole image comes before its tiles", "image_processor.cc",
              "if (config.use_thumbnail && plan.grid.count() > 1)",
              "if (PLANTED && plan.grid.count() > 1)\n    plan.pictures.insert(plan.pictures.begin(), squashed(whole(image), config.size));\n"
              "  else if (config.use_thumbnail && plan.grid.count() > 1)",
              "ImageProcessor.TheWholeImageComesFirstInLlavaNextAndLastInInternVl"),
    media_bug("media_patches_row_by_row", "patches come row by row, not in the blocks that are merged", "image_processor.cc",
              "const int64_t block = patch * merge;", "if (PLANTED) merge = 1;\n  const int64_t block = patch * merge;",
              "Patches.ComeInBlocksThatAreMerged"),
    media_bug("media_frames_of_one_more", "a sound has the frames of one sample more", "log_mel.cc",
              "return (samples + kMelHop - 1) / kMelHop;", "return (samples + (PLANTED ? 1 : 0) + kMelHop - 1) / kMelHop;",
              "LogMel.FramesAndTokens"),
)
