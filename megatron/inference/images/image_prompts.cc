#include "megatron/inference/images/image_prompts.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/multimodal/image_patches.h"
#include "megatron/datasets/multimodal/medium_facts.h"
#include "megatron/datasets/multimodal/sound_frames.h"
#include "megatron/inference/images/held_rows.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/mimo/read_images.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

SftConfig with_template(const std::string& chat_template) {
  SftConfig out;
  out.chat_template = chat_template;
  return out;
}

MediaSource source_of(const RowMedium& medium, const std::string& where) {
  return {{reinterpret_cast<const uint8_t*>(medium.bytes.data()), medium.bytes.size()},
          cat(where, ": ", medium.path)};
}

int64_t count_of(const std::string& text, const std::string& what) {
  int64_t out = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size()))
    ++out;
  return out;
}

std::string counted(int64_t count, std::string_view what) {
  return cat(count, " ", what, count == 1 ? "" : "s");
}

// Media that rules are for: "image", "sound" or "image<between>sound".
std::string media_names(const MediaRules& rules, const char* between) {
  return cat(rules.sees() ? "image" : "", rules.sees() && rules.hears() ? between : "",
             rules.hears() ? "sound" : "");
}

int64_t count_of_kind(const MultimodalRow& row, MediaKind kind) {
  return std::ranges::count(row.media, kind, &RowMedium::kind);
}

const MimoConfig& own_of(const Model& model) { return *model.config().own.as<MimoConfig>(); }

}  // namespace

bool reads_media(const ModelConfig& config, MediaKind kind) {
  const auto* own = config.own.as<MimoConfig>();
  return own != nullptr && (kind == MediaKind::kImage ? own->sees() : own->hears());
}

bool reads_both_media(const ModelConfig& config) {
  return reads_media(config, MediaKind::kImage) && reads_media(config, MediaKind::kSound);
}

std::string MediaFolders::text() const {
  return media.string() + (sounds.empty() ? "" : " and " + sounds.string());
}

std::string ImagePrompt::counts() const {
  return cat(images > 0 ? counted(images, "image") : "", images > 0 && sounds > 0 ? " and " : "",
             sounds > 0 ? counted(sounds, "sound") : "");
}

std::string_view ImagePrompt::kinds() const {
  return images > 0 && sounds > 0 ? "images and sounds" : sounds > 0 ? "sounds" : "images";
}

ImagePrompts::ImagePrompts(Model& model, const Tokenizer& tokenizer, const MediaFolders& folders,
                           const std::string& chat_template, bool escape_literals,
                           MediaLimits limits)
    : model_(model),
      conversations_(tokenizer, folders.media, with_template(chat_template)),
      encoder_(tokenizer, conversations_,
               read_media_rules(folders.media, folders.sounds, tokenizer), escape_literals),
      limits_(limits),
      device_(model.parameters().front()->value.device()) {
  MEGATRON_ASSERT(reads_media(model.config(), MediaKind::kImage) ||
                      reads_media(model.config(), MediaKind::kSound),
                  "media for a model without an encoder");
  check_media_rules(encoder_.rules(), own_of(model), folders.text());
}

void ImagePrompts::use_graphs() {
  if (device_.is_cuda()) dynamic_cast<MimoModel&>(model_).use_picture_graphs();
}

void ImagePrompts::forget_graphs() { dynamic_cast<MimoModel&>(model_).forget_picture_graphs(); }

ImagePrompt ImagePrompts::of_text(const MultimodalRow& row, const std::string& where) const {
  const MediaRules& rules = encoder_.rules();
  std::string counts;
  int64_t all = 0;
  bool right = true;
  for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound}) {
    const std::optional<ModalityRule>& rule = rules.of(kind);
    if (!rule) continue;
    const int64_t written = count_of(row.caption, rule->placeholder),
                  media = count_of_kind(row, kind);
    counts += cat(counts.empty() ? "" : " and ", rule->placeholder, " ", written,
                  written == 1 ? " time for " : " times for ", counted(media, name_of(kind)));
    all += written;
    right &= written == media;
  }
  MEGATRON_CHECK(all == 0 || right, where, ": the text has ", counts, "\nhint: once for each ",
                 media_names(rules, " and "), ", or not at all: then ",
                 media_names(rules, "s and "), "s come before the text");
  std::string text;
  for (const RowMedium& medium : row.media)
    if (const auto& rule = rules.of(medium.kind); rule && all == 0) text += rule->placeholder;
  return prompt_of(text + row.caption, row, where);
}

ImagePrompt ImagePrompts::of_conversation(const MultimodalRow& row, const Chat& chat,
                                          const std::string& where) const {
  return prompt_of(chat.prompt(encoder_.conversation(row, where), where), row, where);
}

ImagePrompt ImagePrompts::ids_of_conversation(const MultimodalRow& row, const Chat& chat,
                                              const std::string& where) const {
  const std::string text = chat.prompt(encoder_.conversation(row, where), where);
  return ids_of(text, row, facts_of(row, where), where);
}

std::vector<MediumFacts> ImagePrompts::facts_of(const MultimodalRow& row,
                                                const std::string& where) const {
  std::vector<MediumFacts> media;
  for (const RowMedium& medium : row.media) {
    MEGATRON_CHECK(encoder_.rules().of(medium.kind), where, ": there is ",
                   medium.kind == MediaKind::kImage ? "an image" : "a sound",
                   ", which the model does not read");
    const MediaSource source = source_of(medium, where);
    media.push_back(read_medium_facts(medium.kind, source.bytes, source.name, limits_));
  }
  return media;
}

ImagePrompt ImagePrompts::ids_of(const std::string& text, const MultimodalRow& row,
                                 const std::vector<MediumFacts>& media,
                                 const std::string& where) const {
  const EncodedSample sample = encoder_.encode_rendered({text, {}}, row, media, where);
  ImagePrompt out;
  out.text = text;
  out.ids = expanded_ids(sample);
  for (int32_t& id : out.ids) id = id < 0 ? ~id : id;
  for (const int32_t id : out.ids) {
    out.media_tokens += is_medium(id);
    MEGATRON_CHECK(id < model_.config().vocab_size || is_medium(id), where, " has the token id ",
                   id, ", the model's vocabulary has ", model_.config().vocab_size);
  }
  out.images = count_of_kind(row, MediaKind::kImage);
  out.sounds = count_of_kind(row, MediaKind::kSound);
  return out;
}

ImagePrompt ImagePrompts::prompt_of(const std::string& text, const MultimodalRow& row,
                                    const std::string& where) const {
  const std::vector<MediumFacts> media = facts_of(row, where);
  ImagePrompt out = ids_of(text, row, media, where);
  if (media.empty()) return out;
  check_length(out, 0, where);  // before anything is decoded
  const std::vector<int64_t> tokens(out.ids.begin(), out.ids.end());
  if (out.sounds > 0)
    out.media.sounds = std::make_shared<const PackedSounds>(
        to_device(packed_sounds(row, media, tokens, where), device_));
  if (out.images > 0)
    out.media.images = std::make_shared<const PackedImages>(
        to_device(packed_images(row, media, tokens, where), device_));
  return out;
}

bool ImagePrompts::is_medium(int32_t id) const {
  const MimoConfig& own = own_of(model_);
  return (own.sees() && id == own.image_token_id) || (own.hears() && id == own.audio_token_id);
}

PackedImages ImagePrompts::packed_images(const MultimodalRow& row,
                                         const std::vector<MediumFacts>& media,
                                         const std::vector<int64_t>& ids,
                                         const std::string& where) const {
  const MediaRules& rules = encoder_.rules();
  const MimoConfig& own = own_of(model_);
  std::vector<SeenImage> images;
  int64_t bytes = 0;
  for (const MediumFacts& medium : media) {
    if (medium.kind != MediaKind::kImage) continue;
    const SampleImage image = sample_image(rules, medium);
    images.push_back(seen_image(0, image));
    bytes += image.bytes();
  }
  const int64_t patch = own.patch_elements();
  const at::Tensor patches = at::empty({bytes / patch, patch}, at::kByte);
  auto* to = patches.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < media.size(); ++i) {
    if (media[i].kind != MediaKind::kImage) continue;
    const int64_t size = sample_image(rules, media[i]).bytes();
    read_patches(rules, source_of(row.media[i], where), media[i].size, limits_,
                 {to, static_cast<size_t>(size)});
    to += size;
  }
  PixelTable numbers = pixel_table(rules.processor.scaling);
  return pack_images(own, images, patches,
                     at::from_blob(numbers.front().data(), {3, 256}, at::kFloat).clone(), ids, 1,
                     own.image_token_id);
}

PackedSounds ImagePrompts::packed_sounds(const MultimodalRow& row,
                                         const std::vector<MediumFacts>& media,
                                         const std::vector<int64_t>& ids,
                                         const std::string& where) const {
  const MediaRules& rules = encoder_.rules();
  const MimoConfig& own = own_of(model_);
  std::vector<SeenSound> sounds;
  std::vector<at::Tensor> frames;
  for (size_t i = 0; i < media.size(); ++i) {
    if (media[i].kind != MediaKind::kSound) continue;
    const SampleSound sound = sample_sound(rules, media[i]);
    sounds.push_back(seen_sound(0, sound));
    at::Tensor& one = frames.emplace_back(at::empty({sound.rows(), sound.bins}, at::kFloat));
    read_frames(rules, source_of(row.media[i], where), media[i].samples, limits_,
                {one.mutable_data_ptr<float>(), static_cast<size_t>(one.numel())});
  }
  return pack_sounds(own, sounds, at::cat(frames), ids, 1, own.audio_token_id);
}

void ImagePrompts::check_length(const ImagePrompt& prompt, int64_t tokens_to_generate,
                                const std::string& where) const {
  const int64_t length = std::ssize(prompt.ids), most = model_.config().transformer.seq_length;
  const std::string text =
      tokens_to_generate > 0 ? cat("; with ", tokens_to_generate, " to generate that is") : ",";
  const bool media = prompt.media_tokens > 0;
  MEGATRON_CHECK(length + tokens_to_generate <= most, where, " has ", length, " tokens",
                 media ? cat(", ", prompt.media_tokens, " of them of ", prompt.counts()) : "", text,
                 " beyond the model's context of ", most, "\nhint: give ",
                 media ? cat("fewer ", prompt.kinds(), ", or ") : "", "a shorter text");
}

Generation ImagePrompts::start(const ImagePrompt& prompt, int64_t tokens_to_generate,
                               const std::string& where) const {
  check_length(prompt, tokens_to_generate, where);
  const auto last = std::find_if(prompt.ids.rbegin(), prompt.ids.rend(),
                                 [&](int32_t id) { return is_medium(id); });
  const int64_t count = prompt.ids.rend() - last;
  Generation out;
  out.prompt_tokens = prompt.ids;
  if (count == 0) return out;
  const std::vector<int64_t> ids(prompt.ids.begin(), prompt.ids.begin() + count);
  const at::Tensor tokens = at::tensor(ids, at::kLong).unsqueeze(0).to(device_);
  std::vector<int64_t> ends;
  auto& model = dynamic_cast<MimoModel&>(model_);
  at::Tensor rows =
      model.prompt_rows(tokens, prompt.media.images.get(), &ends, prompt.media.sounds.get());
  auto given = std::make_shared<GivenRows>();
  given->count = count;
  given->width = rows.size(1);
  given->ends = std::move(ends);
  if (prompt.media.images) given->positions = prompt.media.images->positions_of(count);
  given->ids = model.text_of_prompt(tokens);
  const ParallelGroups& groups = model.groups();
  if (device_.is_cuda() && groups.tp.size() * groups.pp.size() == 1) {
    const at::ScalarType type = model_.parameters().front()->value.scalar_type();
    given->held = std::make_shared<const HeldRows>(HeldRows{
        at::empty(rows.sizes(), at::dtype(type).pinned_memory(true)).copy_(rows.to(type))});
  } else {
    rows = rows.to(at::kCPU).contiguous();
    const float* values = rows.const_data_ptr<float>();
    given->values.assign(values, values + rows.numel());
  }
  out.rows = std::move(given);
  return out;
}

}  // namespace megatron
