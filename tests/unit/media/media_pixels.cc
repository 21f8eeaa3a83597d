// Lines "FILE white|drop FILTER HEIGHT WIDTH TOP LEFT KEPT_HEIGHT KEPT_WIDTH" from standard input;
// for each "HEIGHT WIDTH CRC CRC_OF_RESIZED", or "error: MESSAGE". With --save FOLDER the pixels of
// both are written there too, as N.rgb and N.resized.rgb.
#include <zlib.h>

#include <fstream>
#include <iostream>
#include <sstream>

#include "megatron/base/files.h"
#include "megatron/media/decode.h"
#include "megatron/media/resample.h"

namespace megatron {
namespace {

uint32_t crc_of(const Image& image) {
  return static_cast<uint32_t>(crc32_z(0, image.bytes().data(), image.bytes().size()));
}

void save(const Image& image, const std::string& path) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(image.bytes().data()),
             static_cast<std::streamsize>(image.bytes().size()));
}

std::string line_of(const std::string& line, const std::string& folder, int number) {
  std::istringstream in(line);
  std::string path, transparency;
  int filter = 0;
  ImageSize size;
  ImageBox keep;
  in >> path >> transparency >> filter >> size.height >> size.width >> keep.top >> keep.left >>
      keep.size.height >> keep.size.width;
  const MappedFile file(path);
  const auto* bytes = reinterpret_cast<const uint8_t*>(file.bytes().data());
  try {
    const Image image = decode_image(
        {{bytes, file.bytes().size()}, path},
        {.transparency = transparency == "drop" ? Transparency::kDrop : Transparency::kWhite});
    const Image small = resized(image, size, static_cast<Resampling>(filter), keep);
    if (!folder.empty()) {
      save(image, cat(folder, "/", number, ".rgb"));
      save(small, cat(folder, "/", number, ".resized.rgb"));
    }
    return cat(image.height(), " ", image.width(), " ", crc_of(image), " ", crc_of(small));
  } catch (const MediaError& error) {
    return cat("error: ", error.what());
  }
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  const std::string folder = argc == 3 && std::string(argv[1]) == "--save" ? argv[2] : "";
  int number = 0;
  for (std::string line; std::getline(std::cin, line);)
    std::cout << megatron::line_of(line, folder, number++) << "\n" << std::flush;
}
