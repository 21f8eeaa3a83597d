// Training of a GPT that reads images and sounds beside text.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "megatron/datasets/multimodal/mock_multimodal_dataset.h"
#include "megatron/datasets/multimodal/multimodal_dataset.h"
#include "megatron/datasets/tuning/sft_dataset.h"
#include "megatron/interop/load_model.h"
#include "megatron/interop/model_parts.h"
#include "megatron/models/mimo/image_blocks.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/mimo/read_images.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/frozen_media.h"
#include "megatron/training/arguments/mimo_rules.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {
namespace {

// -- data

void report(const std::string& path, Split split, const MultimodalCounts& counts, int64_t length) {
  const auto count = [](int64_t n) { return format_count(static_cast<uint64_t>(n)); };
  const auto percent = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0 : (200 * part + whole) / (2 * whole);
  };
  std::string text =
      cat(to_string(split), " split of ", path, ": ", count(counts.samples), " samples, ",
          count(counts.positions), " tokens of which ", percent(counts.counted, counts.positions),
          "% count, ", count(counts.patches), " patches, ", count(counts.sequences),
          " sequences an epoch, ", percent(counts.packed, counts.sequences * length),
          "% full, at most ", count(counts.most_patches), " patches in one");
  const int64_t used = counts.samples - counts.dropped - counts.silent;
  if (counts.drawn != used) text += cat("; ", count(counts.drawn), " samples with repetitions");
  if (counts.cut > 0) text += cat("; ", count(counts.cut), " cut at --seq-length");
  if (counts.dropped > 0)
    text += cat("; ", count(counts.dropped), " longer than --seq-length dropped, the first is ",
                counts.first_dropped);
  if (counts.silent > 0)
    text += cat("; ", count(counts.silent), " without a token that counts dropped");
  if (counts.bad > 0)
    text += cat("; ", count(counts.bad), " with media that cannot be decoded, which count nothing");
  log_info(text);
}

std::optional<int64_t> most_bad_media(const MimoDataConfig& data) {
  if (data.on_bad_media == OnBadMedia::kError) return {};
  return data.max_bad_media.value_or(kMostBadMedia);
}

std::string part_of(Split split) {
  return split == Split::kTrain ? "train" : split == Split::kValid ? "val" : "test";
}

// The data paths with blends of Megatron-Energon written out. One of --data-path has all splits.
DataConfig without_energon_blends(const DataConfig& given) {
  DataConfig out = given;
  const auto is_blend = [](const std::vector<std::string>& path) {
    return path.size() == 1 && is_energon_blend(path[0]);
  };
  if (is_blend(given.data_path)) {
    out.data_path.clear();
    out.train_data_path = out.valid_data_path = out.test_data_path = given.data_path;
  }
  for (const auto& [paths, split] : {std::pair{&out.train_data_path, Split::kTrain},
                                     std::pair{&out.valid_data_path, Split::kValid},
                                     std::pair{&out.test_data_path, Split::kTest}})
    if (is_blend(*paths)) *paths = read_energon_blend((*paths)[0], part_of(split));
  return out;
}

// Indices of files, each built once, even if several splits use it.
class MediaFiles {
 public:
  MediaFiles(const Arguments& a, const Tokenizer& tokenizer)
      : data_(own_config<MimoDataConfig>(a.own)),
        cache_path_(a.data.data_cache_path),
        conversations_(tokenizer, data_.media_model, a.sft),
        encoder_(tokenizer, conversations_,
                 read_media_rules(data_.media_model, data_.audio_media_model, tokenizer),
                 data_.escape_modality_text) {
    const std::string& sounds = data_.audio_media_model;
    check_media_rules(encoder_.rules(), own_config<MimoConfig>(a.own),
                      data_.media_model + (sounds.empty() ? "" : " and " + sounds));
    limits_.max_image_pixels = data_.max_image_pixels;
  }

  // Of folders of Megatron-Energon each split has a part of its own.
  std::shared_ptr<const MultimodalIndex> open(const std::string& path, Split split) {
    const std::lock_guard lock(mutex_);
    const std::string part = is_energon(path) ? part_of(split) : "";
    std::shared_ptr<const MultimodalIndex>& index = open_[cat(part, ":", path)];
    if (!index) {
      index = std::make_shared<const MultimodalIndex>(
          path, encoder_,
          MultimodalIndexOptions{.media_root = data_.media_root,
                                 .cache_path = cache_path_,
                                 .part = part,
                                 .limits = limits_,
                                 .most_media = data_.max_images_per_sample,
                                 .most_bad = most_bad_media(data_)});
      for (const BadSample& bad : index->bad_samples())
        log_warning(cat(bad.reason, ": the sample counts nothing"));
    }
    return index;
  }
  MultimodalDatasetOptions options(const Arguments& a, const DatasetRequest& request) const {
    return {.sequence_length = request.sequence_length,
            .seed = request.seed,
            .long_samples = a.sft.sft_long_conversations == SftLongConversations::kCut
                                ? LongSamples::kCut
                                : LongSamples::kDrop,
            .fusion = {data_.loss_at_media},
            .most_patches = data_.max_patches_per_sequence,
            .shuffle_window = data_.shuffle_window,
            .limits = limits_};
  }

 private:
  const MimoDataConfig data_;
  const std::string cache_path_;
  MediaLimits limits_;
  const ConversationEncoder conversations_;
  const MultimodalEncoder encoder_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const MultimodalIndex>> open_;
};

// Sounds of two tokens, of three with a row that only others attend to, and of one; of models that
// stack rows one of a clip.
void add_mock_sounds(const AudioConfig& own, std::vector<MockImage>& out) {
  const std::vector<int64_t> lengths =
      own.stacks() ? std::vector<int64_t>{500} : std::vector<int64_t>{8, 13, 3};
  for (const int64_t frames : lengths) {
    const int64_t rows = packed_frames(own, frames);
    out.push_back({{},
                   own.sound_features(frames),
                   {.frames = frames, .frames_of_clip = rows - 2, .bins = own.audio_mel_bins}});
  }
}

// z with P(Z <= z) = p of a standard normal Z.
double normal_quantile(double p) {
  double low = -8.0, high = 8.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::sqrt(2.0)) / 2 < p ? low : high) = middle;
  }
  return (low + high) / 2;
}

// Patches (rows, columns) of images whose logarithm is normal: its quantiles, near squares.
std::vector<std::pair<int64_t, int64_t>> log_normal_sizes(const MimoDataConfig& data) {
  const int kinds = data.mock_image_sigma > 0.0 ? 64 : 1;
  std::vector<std::pair<int64_t, int64_t>> out;
  for (int i = 0; i < kinds; ++i) {
    const double patches = static_cast<double>(data.mock_image_patches) *
                           std::exp(data.mock_image_sigma * normal_quantile((i + 0.5) / kinds));
    const auto even = [](double side) { return 2 * std::max<int64_t>(1, std::llround(side / 2)); };
    const int64_t rows = even(std::sqrt(patches));
    out.emplace_back(rows, even(patches / static_cast<double>(rows)));
  }
  return out;
}

// One picture; and of models whose images have tiles, several of them.
std::vector<MockImage> mock_kinds(const MimoConfig& own, const MimoDataConfig& data) {
  std::vector<MockImage> out;
  if (own.hears()) add_mock_sounds(own, out);
  if (!own.sees()) return out;
  const auto add = [&](int64_t pictures, TileGrid grid, ImageSize size) {
    const SampleImage image = {
        own.patch_rows(), own.patch_columns(), pictures, own.patch_elements(), grid, size};
    out.push_back({image, image_tokens(own, seen_image(0, image))});
  };
  if (own.has_own_sizes()) {  // wider and higher than the other side, and than a window
    const int64_t side = own.has_windows() ? 2 * own.window_side() : 2, more = side + 2;
    const std::vector<std::pair<int64_t, int64_t>> few = {{side, more}, {more, side}, {2, 2}};
    for (const auto& [rows, columns] : data.mock_image_patches > 0 ? log_normal_sizes(data) : few) {
      const SampleImage image = {rows, columns, 1, own.patch_elements(), {}, {}};
      out.push_back({image, image_tokens(own, seen_image(0, image))});
    }
    return out;
  }
  add(1, {}, {own.img_h, own.img_w});
  if (own.vision_newlines) {
    add(3, {1, 2}, {own.img_h, 2 * own.img_w - 1});
    add(3, {2, 1}, {own.img_h, own.img_w});  // columns of the map show padding
  }
  if (own.pixel_shuffle) add(3, {1, 2}, {own.img_h, 2 * own.img_w});
  return out;
}

TrainValidTestDatasets mimo_datasets(const Arguments& a, const DatasetRequest& given) {
  DatasetRequest request = given;
  if (a.data.mock_data) {
    const auto& own = own_config<MimoConfig>(a.own);
    const auto& data = own_config<MimoDataConfig>(a.own);
    const MockImages images = {mock_kinds(own, data),
                               own.sees() ? own.image_token_id : -1,
                               own.hears() ? own.audio_token_id : -1,
                               given.tokenizer.vocab_size,
                               given.seed,
                               data.mock_images};
    request.make_mock = [config = gpt_dataset_config(a.data, given), images](Split split,
                                                                             int64_t count) {
      return std::make_shared<const MockMultimodalDataset>(
          make_mock_sft_dataset(split, count, config), images);
    };
    return build_train_valid_test_datasets(a.data, request);
  }
  MEGATRON_ASSERT(given.text_tokenizer != nullptr);
  const auto files = std::make_shared<MediaFiles>(a, *given.text_tokenizer);
  request.make_member = [files, options = files->options(a, given)](const MemberRequest& member) {
    const auto bounds = is_energon(member.path) ? std::pair(0.0, 1.0) : member.bounds;
    auto dataset = std::make_shared<const MultimodalDataset>(
        files->open(member.path, member.split), bounds, member.split, member.num_samples, options);
    report(member.path, member.split, dataset->counts(), options.sequence_length);
    return dataset;
  };
  return build_train_valid_test_datasets(without_energon_blends(a.data), request);
}

// -- micro-batches

// Of each token of the samples 0 if a document begins there.
std::vector<int64_t> document_places(const MicroBatch& source) {
  const int64_t length = source.sequence_length();
  std::vector<int64_t> out(static_cast<size_t>(source.micro_batch_size * length), 1);
  for (int64_t i = 0; i < source.micro_batch_size; ++i) {
    out[static_cast<size_t>(i * length)] = 0;
    for (const int32_t start : source.document_starts[static_cast<size_t>(i)])
      out[static_cast<size_t>(i * length + start)] = 0;
  }
  return out;
}

// A tensor keeps the micro-batch alive; nothing writes to it.
template <class T>
at::Tensor tensor_of(const std::shared_ptr<const MicroBatch>& source, const T& values,
                     at::IntArrayRef shape, at::ScalarType type) {
  return at::from_blob(
      const_cast<void*>(static_cast<const void*>(values.data())), shape, [source](void*) {},
      at::TensorOptions().dtype(type));
}

PackedImages packed_images(const MimoConfig& own, const std::shared_ptr<const MicroBatch>& source) {
  const BatchImages& images = *source->images;
  std::vector<SeenImage> all;
  for (const auto& [sample, image, owner] : images.all)
    all.push_back(seen_image(sample, image, owner));
  const int64_t patch = own.patch_elements();
  const auto tokens = source->data().all<int64_t>("tokens");
  PackedImages packed = pack_images(
      own, all,
      images.ranks.reads ? tensor_of(source, images.patches,
                                     {std::ssize(images.patches) / patch, patch}, at::kByte)
                         : at::Tensor(),
      tensor_of(source, images.pixel_values, {3, 256}, at::kFloat), tokens,
      source->micro_batch_size, own.image_token_id, images.ranks.rank, images.ranks.size,
      document_places(*source), images.ranks.replicas);
  if (own.bidirectional_images && images.ranks.merged() == 1)
    packed.blocks = std::make_shared<TokenBlocks>(
        image_blocks(tokens, source->micro_batch_size, own.image_token_id, documents_of(*source)));
  return packed;
}

PackedSounds packed_sounds(const MimoConfig& own, const std::shared_ptr<const MicroBatch>& source) {
  const BatchSounds& sounds = *source->sounds;
  std::vector<SeenSound> all;
  for (const auto& [sample, sound, owner] : sounds.all)
    all.push_back(seen_sound(sample, sound, owner));
  const int64_t bins = own.audio_mel_bins;
  return pack_sounds(
      own, all,
      sounds.ranks.reads
          ? tensor_of(source, sounds.frames, {std::ssize(sounds.frames) / bins, bins}, at::kFloat)
          : at::Tensor(),
      source->data().all<int64_t>("tokens"), source->micro_batch_size, own.audio_token_id,
      sounds.ranks.rank, sounds.ranks.size, sounds.ranks.replicas);
}

// As the rank reads it, on the device.
template <class Packed>
std::shared_ptr<const Packed> held(Packed packed, const ImageRanks& ranks, const MicroBatch& source,
                                   c10::Device device) {
  const int64_t s = source.sequence_length();
  if (ranks.parts > 1)
    packed =
        packed.of_tokens(zigzag_positions(s, ranks.parts, ranks.part), source.micro_batch_size, s);
  return std::make_shared<const Packed>(to_device(packed, device));
}

// The images and sounds of a micro-batch, on the device.
BatchMaker::Addition add_media(const ModelConfig& config) {
  const auto& own = config.own.as_or_default<MimoConfig>();
  return [own](const std::shared_ptr<const MicroBatch>& source, c10::Device device, Batch& batch) {
    MEGATRON_ASSERT(source->images.has_value() && source->sounds.has_value(), "data without media");
    const ImageRanks& ranks = source->images->ranks;
    if (own.sees()) batch.images = held(packed_images(own, source), ranks, *source, device);
    if (own.hears()) batch.sounds = held(packed_sounds(own, source), ranks, *source, device);
  };
}

// A plan counts the pictures of a sequence, which a flag of the data limits.
ModelProvider mimo_provider() {
  return [provide = provide_model("mimo")](const Arguments& arguments, const Vocabulary& vocabulary,
                                           const ParallelGroups& groups, const StageSlice& slice,
                                           const std::vector<Model*>& chunks) {
    Arguments counted = arguments;
    auto& own = own_config<MimoConfig>(counted.own);
    const int64_t most = own_config<MimoDataConfig>(arguments.own).max_patches_per_sequence;
    const int64_t one = own.has_own_sizes() ? 4 : own.patches();
    if (most > 0) own.most_pictures = std::max<int64_t>(1, most / one);
    if (slice.all_parts > 0) find_frozen_media(counted.training, counted.transformer, own);
    return provide(counted, vocabulary, groups, slice, chunks);
  };
}

// Parts with gradient norms of their own, by the names of checkpoints; last what is left.
std::vector<std::pair<std::string, std::vector<std::string>>> norm_parts(const MimoConfig& own) {
  std::vector<std::pair<std::string, std::vector<std::string>>> out;
  const auto add = [&](const char* name, const char* also = nullptr) {
    out.push_back({name, {cat(name, ".")}});
    if (also != nullptr) out.back().second.emplace_back(also);
  };
  if (own.sees()) {
    add("vision_model");
    add("vision_projection", "image_newline");
  }
  if (own.hears()) {
    add("audio_model");
    add("audio_projection");
  }
  add("language_model");
  return out;
}

// Frozen encoders run on micro-batches before their turn.
std::function<PretrainTask::Ahead(Model&)> encoders_ahead(const MimoConfig& own) {
  return [depth = static_cast<int>(own.microbatches_ahead())](Model& chunk) {
    auto* const model = dynamic_cast<MimoModel*>(&chunk);
    if (model == nullptr || !model->encodes_ahead()) return PretrainTask::Ahead();
    return PretrainTask::Ahead{
        depth, [model](Batch& batch, bool training) { model->encode_ahead(batch, training); }};
  };
}

// -- pretrained parts

// An encoder's folder, or a language model without one.
void join_pretrained_parts(const Arguments& arguments, const Vocabulary& vocabulary,
                           StartPoint& start) {
  if (start.continues()) return;
  const auto& data = own_config<MimoDataConfig>(arguments.own);
  PartsRequest request{{}, data.pretrained_vision_model, data.pretrained_audio_model};
  if (request.vision.empty() && request.audio.empty() &&
      (!start.checkpoint || stored_model_type(*start.checkpoint) != "gpt"))
    return;
  request.language = std::move(start.checkpoint);
  ModelParts parts =
      join_parts(request, whole_model(mimo_provider(), arguments, vocabulary)->config());
  start.checkpoint = std::move(parts.language);
  start.weights_only = true;
  start.encoders = std::move(parts.encoders);
  start.random = std::move(parts.random);
  start.notes = std::move(parts.notes);
}

PretrainTask mimo_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "mimo";
  task.model_provider = mimo_provider();
  task.datasets_provider = mimo_datasets;
  task.add_to_batch = add_media;
  const auto& own = own_config<MimoConfig>(arguments.own);
  if (own.microbatches_ahead() > 0) task.ahead = encoders_ahead(own);
  task.join_parts = join_pretrained_parts;
  task.norm_parts = norm_parts(own);
  task.logs_images = own.sees();
  task.logs_sounds = own.hears();
  task.flops_per_token = [provide = task.model_provider](const Arguments& a,
                                                         const Vocabulary& vocabulary) {
    return model_flops_per_token(provide, a, vocabulary);
  };
  return task;
}

}  // namespace

const TaskType& mimo_task_type() {
  static const TaskType type = {.name = "mimo",
                                .make = mimo_task,
                                .config = OwnConfig(MimoDataConfig()),
                                .validate = validate_mimo,
                                .shrink = shrink_mimo};
  return type;
}

}  // namespace megatron
