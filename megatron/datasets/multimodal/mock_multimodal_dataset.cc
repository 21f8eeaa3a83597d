#include "megatron/datasets/multimodal/mock_multimodal_dataset.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/detail/numpy_random.h"

namespace megatron {
namespace {

constexpr int64_t kMockBlock = 8, kMockBlocks = 3, kMockPair = 2;

NumpyRandom random_of(int64_t seed, int64_t index) {
  return NumpyRandom(static_cast<uint32_t>(seed * 7919 + index));
}

}  // namespace

MockMultimodalDataset::MockMultimodalDataset(std::shared_ptr<const Dataset> texts,
                                             MockImages images)
    : Dataset(texts->columns()),
      texts_(std::move(texts)),
      images_(std::move(images)),
      pixel_values_(pixel_table(kClipScaling)) {
  const int64_t room = sequence_length() - 1;
  const size_t given = images_.kinds.size();
  std::erase_if(images_.kinds, [&](const MockImage& kind) { return kind.tokens > room; });
  MEGATRON_CHECK(!images_.kinds.empty(), "a sample of ", sequence_length(),
                 " tokens has no room for any of ", given, " kinds of images");
}

std::vector<MockMultimodalDataset::Placed> MockMultimodalDataset::placed(int64_t index) const {
  if (images_.per_sample == 0) {
    if (index / kMockBlock % kMockBlocks == 1) return {};
    if (random_of(images_.seed + 1, index / kMockPair).randint(0, 5) < 2) return {};
  }
  NumpyRandom random = random_of(images_.seed, index);
  int64_t free = sequence_length() - 1;  // the last token is text
  std::vector<Placed> out;
  const int64_t count = images_.per_sample > 0 ? images_.per_sample : random.randint(1, 3);
  while (std::ssize(out) < count) {
    const MockImage& kind =
        images_.kinds[static_cast<size_t>(random.randint(0, std::ssize(images_.kinds)))];
    if (kind.tokens > free) {
      if (!out.empty()) break;
      continue;
    }
    free -= kind.tokens;
    out.push_back({0, kind});
  }
  int64_t position = 0;
  for (Placed& image : out) {
    const int64_t text = random.randint(0, free + 1);
    free -= text;
    image.position = position + text;
    position = image.position + image.what.tokens;
  }
  return out;
}

void MockMultimodalDataset::read(int64_t index, const SampleSpans& out,
                                 std::vector<int32_t>& document_starts) const {
  texts_->read(index, out, document_starts);
  const GPTSpans spans(out);
  for (const std::span<int64_t> ids : {spans.tokens, spans.labels})
    for (int64_t& id : ids)
      while (id == images_.token || id == images_.sound_token) id = (id + 1) % images_.vocab_size;
  for (const Placed& image : placed(index)) {
    const int64_t end = image.position + image.what.tokens,
                  token = image.what.is_sound() ? images_.sound_token : images_.token;
    for (int64_t i = image.position; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      spans.tokens[at] = token;
      if (i == 0) continue;
      spans.labels[at - 1] = token;
      spans.loss_mask[at - 1] = 0.0F;
    }
  }
}

std::vector<SampleImage> MockMultimodalDataset::images(int64_t index) const {
  std::vector<SampleImage> out;
  for (const Placed& image : placed(index))
    if (!image.what.is_sound()) out.push_back(image.what.image);
  return out;
}

std::vector<SampleSound> MockMultimodalDataset::sounds(int64_t index) const {
  std::vector<SampleSound> out;
  for (const Placed& sound : placed(index))
    if (sound.what.is_sound()) out.push_back(sound.what.sound);
  return out;
}

void MockMultimodalDataset::read_sound(int64_t index, int64_t sound,
                                       std::span<float> frames) const {
  NumpyRandom random = random_of(images_.seed + 1002 + sound, index);
  std::ranges::generate(
      frames, [&] { return static_cast<float>(random.next_u32() >> 8) / (1 << 23) - 0.5F; });
}

void MockMultimodalDataset::read_image(int64_t index, int64_t image,
                                       std::span<uint8_t> patches) const {
  NumpyRandom random = random_of(images_.seed + 2 + image, index);
  std::ranges::generate(patches, [&] { return static_cast<uint8_t>(random.next_u32()); });
}

std::string MockMultimodalDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "MockMultimodalDataset").member("token", images_.token);
  json.member("vocab_size", images_.vocab_size).member("random_seed", images_.seed);
  if (images_.per_sample > 0) json.member("per_sample", images_.per_sample);
  json.key("kinds").begin_array();
  for (const auto& [image, tokens, sound] : images_.kinds) {
    json.begin_object().member("tokens", tokens).member("pictures", image.pictures);
    if (sound.frames > 0) json.member("frames", sound.frames).member("bins", sound.bins);
    json.member("rows", image.rows).member("columns", image.columns);
    json.member("patch_bytes", image.patch_bytes).end_object();
  }
  json.end_array().key("texts").raw(texts_->description()).end_object();
  return json.text();
}

}  // namespace megatron
