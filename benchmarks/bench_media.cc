// Images a second: decoding, CLIP's resizing and crop to 336, numbers by table, of one thread or of
// several beside one another. `bench_media FILE SECONDS [THREADS]` prints the milliseconds of
// processor time of each for an image, and the images a second of all threads. Compared with Pillow
// and torchvision by media_peer.py.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#include "megatron/base/files.h"
#include "megatron/media/decode.h"
#include "megatron/media/image_processor.h"

namespace megatron {
namespace {

// Seconds of processor time of this thread: other programs on the machine do not count.
double now() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
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

double wall() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of one thread
struct Measured {
  double decoding = 0, resizing = 0, numbering = 0;  // processor time
  double images = 0, seconds = 0;
};

Measured measure(const MediaSource& source, const ImageProcessorConfig& clip, double seconds) {
  const PixelTable table = pixel_table(clip.scaling);
  std::vector<float> numbers;
  Measured out;
  const double start = wall();
  for (; out.seconds < seconds; out.seconds = wall() - start) {
    const double begin = now();
    const Image image = decode_image(source);
    const double decoded = now();
    const std::vector<Image> pictures = process_image(clip, image);
    const double resized = now();
    to_numbers(pictures[0], table, numbers);
    out.decoding += decoded - begin;
    out.resizing += resized - decoded;
    out.numbering += now() - resized;
    ++out.images;
  }
  return out;
}

void run(const char* path, double seconds, int threads) {
  const MappedFile file(path);
  const MediaSource source = {
      {reinterpret_cast<const uint8_t*>(file.bytes().data()), file.bytes().size()}, path};
  const ImageProcessorConfig clip = read_image_processor(
      R"({"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336})", "clip");
  decode_image(source);  // loads the library
  std::vector<Measured> all(static_cast<size_t>(threads));
  {
    std::vector<std::jthread> running;
    for (Measured& one : all) running.emplace_back([&] { one = measure(source, clip, seconds); });
  }
  Measured sum;
  double rate = 0;
  for (const Measured& one : all) {
    sum.decoding += one.decoding;
    sum.resizing += one.resizing;
    sum.numbering += one.numbering;
    sum.images += one.images;
    rate += one.images / one.seconds;
  }
  std::printf("%.3f %.3f %.3f %.1f\n", 1e3 * sum.decoding / sum.images,
              1e3 * sum.resizing / sum.images, 1e3 * sum.numbering / sum.images, rate);
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  const int threads = argc > 3 ? std::atoi(argv[3]) : 1;
  if (argc < 3 || argc > 4 || threads < 1) return 2;
  megatron::run(argv[1], std::atof(argv[2]), threads);
}
