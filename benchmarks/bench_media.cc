// Images a second of one core: decoding, CLIP's resizing and crop to 336, numbers by table.
// `bench_media FILE SECONDS` prints the milliseconds of processor time of each. Compared with
// Pillow by media_peer.py.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/media/decode.h"
#include "megatron/media/image_processor.h"

namespace megatron {
namespace {

// Seconds of processor time: other programs on the machine do not count.
double now() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// [3, h, w], as the encoder reads it.
void to_numbers(const Image& image, const PixelTable& table, std::vector<float>& out) {
  const int64_t count = image.size().pixels();
  out.resize(static_cast<size_t>(3 * count));
  const uint8_t* in = image.bytes().data();
  for (int64_t i = 0; i < count; ++i)
    for (int c = 0; c < 3; ++c) out[c * count + i] = table[c][in[3 * i + c]];
}

void run(const char* path, double seconds) {
  const MappedFile file(path);
  const MediaSource source = {
      {reinterpret_cast<const uint8_t*>(file.bytes().data()), file.bytes().size()}, path};
  const ImageProcessorConfig clip = read_image_processor(
      R"({"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336})", "clip");
  const PixelTable table = pixel_table(clip.scaling);
  std::vector<float> numbers;
  double decoding = 0, resizing = 0, numbering = 0;
  int images = 0;
  decode_image(source);  // loads the library
  for (const double end = now() + seconds; now() < end; ++images) {
    const double begin = now();
    const Image image = decode_image(source);
    const double decoded = now();
    const std::vector<Image> pictures = process_image(clip, image);
    const double resized = now();
    to_numbers(pictures[0], table, numbers);
    decoding += decoded - begin;
    resizing += resized - decoded;
    numbering += now() - resized;
  }
  std::printf("%.3f %.3f %.3f\n", 1e3 * decoding / images, 1e3 * resizing / images,
              1e3 * numbering / images);
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  megatron::run(argv[1], std::atof(argv[2]));
}
