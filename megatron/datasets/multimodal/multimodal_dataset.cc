#include "megatron/datasets/multimodal/multimodal_dataset.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/datasets/multimodal/image_patches.h"
#include "megatron/datasets/multimodal/sound_frames.h"
#include "megatron/datasets/sampler.h"
#include "megatron/datasets/tuning/first_fit.h"

namespace megatron {

std::vector<int64_t> sample_order(const std::vector<int64_t>& shards, int64_t seed, int64_t epoch,
                                  int64_t window) {
  const auto number = static_cast<uint64_t>(seed + epoch);
  const auto count = std::ssize(shards);
  if (window == 0) return torch_randperm(count, number);
  std::vector<int64_t> begins;  // of the files
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || shards[static_cast<size_t>(i)] != shards[static_cast<size_t>(i) - 1])
      begins.push_back(i);
  begins.push_back(count);
  std::vector<int64_t> out;
  for (const int64_t file : torch_randperm(std::ssize(begins) - 1, number))
    for (int64_t i = begins[static_cast<size_t>(file)]; i < begins[static_cast<size_t>(file) + 1];
         ++i)
      out.push_back(i);
  for (int64_t first = 0; first < count; first += window) {
    const int64_t size = std::min(window, count - first);
    const std::vector<int64_t> before(out.begin() + first, out.begin() + first + size);
    const std::vector<int64_t> order =
        torch_randperm(size, number + static_cast<uint64_t>(first) * 0x9e3779b97f4a7c15U);
    for (int64_t i = 0; i < size; ++i)
      out[static_cast<size_t>(first + i)] =
          before[static_cast<size_t>(order[static_cast<size_t>(i)])];
  }
  return out;
}

struct MultimodalDataset::Impl {
  std::shared_ptr<const MultimodalIndex> index;
  int64_t first = 0, last = 0;
  Split split;
  MultimodalDatasetOptions options;
  MultimodalCounts counts;
  PixelTable pixel_values = {};
  std::vector<int64_t> usable;      // samples of the index
  std::vector<SequenceLoad> loads;  // of sample first + i; no positions: not usable
  PackedSequences sequences;        // of samples

  const SequenceLoad& load(int64_t sample) const {
    return loads[static_cast<size_t>(sample - first)];
  }
  SequenceLoad room() const {
    return {options.sequence_length,
            options.most_patches > 0 ? options.most_patches : std::numeric_limits<int64_t>::max()};
  }
  SequenceLoad load_of(int64_t sample);
  bool is_bad(int64_t sample) const;  // an image of it cannot be decoded
  void choose();
  std::vector<int64_t> drawn(int64_t epoch) const;
  void pack(int64_t epoch);
  void count_epoch();  // once the first is packed
  template <class Use>
  void for_each_member(int64_t sequence, Use&& use) const;
  // Sample and medium of each image or sound of a sequence.
  std::vector<std::pair<int64_t, int64_t>> places_of(MediaKind kind, int64_t sequence) const;
};

std::vector<std::pair<int64_t, int64_t>> MultimodalDataset::Impl::places_of(
    MediaKind kind, int64_t sequence) const {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (const int64_t sample : sequences[sequence])
    for (int64_t m = 0; m < index->media_count(sample); ++m)
      if (index->facts(sample, m).kind == kind) out.emplace_back(sample, m);
  return out;
}

bool MultimodalDataset::Impl::is_bad(int64_t sample) const {
  return std::ranges::binary_search(index->bad_samples(), sample, {}, &BadSample::sample);
}

// Counts what becomes of a sample.
SequenceLoad MultimodalDataset::Impl::load_of(int64_t sample) {
  const EncodedSample tokens = index->sample(sample);
  ++counts.samples;
  const int64_t all = sample_positions(tokens);
  const int64_t kept = kept_positions(tokens, options.sequence_length, options.long_samples);
  if (kept == 0 && all > 0) {
    MEGATRON_CHECK(options.long_samples != LongSamples::kError, index->name(sample), ": takes ",
                   all, " positions, the sequence has ", options.sequence_length);
    if (counts.dropped++ == 0) counts.first_dropped = index->name(sample);
    return {};
  }
  const std::vector<int32_t> ids = expanded_ids(tokens);
  const int64_t counted = std::count_if(ids.begin() + std::min<int64_t>(1, std::ssize(ids)),
                                        ids.begin() + std::min<int64_t>(kept + 1, std::ssize(ids)),
                                        [](int32_t id) { return id >= 0; });
  if (counted == 0) {
    ++counts.silent;
    return {};
  }
  int64_t patches = 0;
  for (int64_t m = 0; m < index->media_count(sample); ++m)
    patches += image_patches(index->rules(), index->facts(sample, m));
  MEGATRON_CHECK(patches <= room()[1], index->name(sample), ": its images have ", patches,
                 " patches, more than the ", options.most_patches, " that a sequence may have");
  counts.cut += kept < all;
  counts.positions += kept;
  counts.bad += is_bad(sample);
  if (!is_bad(sample)) counts.counted += counted;
  counts.patches += patches;
  return {kept, patches};
}

void MultimodalDataset::Impl::choose() {
  for (int64_t i = first; i < last; ++i) {
    loads.push_back(load_of(i));
    if (loads.back()[0] > 0) usable.push_back(i);
  }
}

// The samples of an epoch, ascending: in training each as often as it is repeated, and of a part of
// a repetition the first of a permutation of its own; else each once.
std::vector<int64_t> MultimodalDataset::Impl::drawn(int64_t epoch) const {
  if (split != Split::kTrain) return usable;
  std::vector<int64_t> out;
  auto begin = usable.begin();
  uint64_t number = static_cast<uint64_t>(options.seed + epoch);
  for (const RepeatedSamples& part : index->repetitions()) {
    const auto end = std::lower_bound(begin, usable.end(), part.end);
    const double whole = std::floor(part.times);
    const auto more = static_cast<int64_t>(static_cast<double>(end - begin) * (part.times - whole));
    std::vector<int64_t> times(static_cast<size_t>(end - begin), static_cast<int64_t>(whole));
    number += 0x9e3779b97f4a7c15U;
    if (more > 0) {
      const std::vector<int64_t> order = torch_randperm(std::ssize(times), number);
      for (int64_t i = 0; i < more; ++i)
        ++times[static_cast<size_t>(order[static_cast<size_t>(i)])];
    }
    for (size_t i = 0; i < times.size(); ++i)
      out.insert(out.end(), static_cast<size_t>(times[i]), begin[static_cast<std::ptrdiff_t>(i)]);
    begin = end;
  }
  return out;
}

void MultimodalDataset::Impl::pack(int64_t epoch) {
  const std::vector<int64_t> all = drawn(epoch);
  MEGATRON_CHECK(!all.empty(), index->path(), ": the repetitions of its samples are less than one");
  std::vector<int64_t> ordered = all;
  if (split == Split::kTrain) {
    std::vector<int64_t> shards;
    for (const int64_t sample : all) shards.push_back(index->shard(sample));
    const std::vector<int64_t> order =
        sample_order(shards, options.seed, epoch, options.shuffle_window);
    for (size_t i = 0; i < order.size(); ++i) ordered[i] = all[static_cast<size_t>(order[i])];
  }
  sequences.pack(ordered, [&](int64_t sample) { return load(sample); }, room());
}

template <class Use>
void MultimodalDataset::Impl::for_each_member(int64_t sequence, Use&& use) const {
  int64_t at = 0;
  for (const int64_t sample : sequences[sequence]) {
    use(sample, at, load(sample)[0]);
    at += load(sample)[0];
  }
}

void MultimodalDataset::Impl::count_epoch() {
  counts.sequences = sequences.size();
  for (int64_t s = 0; s < counts.sequences; ++s) {
    int64_t patches = 0;
    for_each_member(s, [&](int64_t sample, int64_t, int64_t kept) {
      patches += load(sample)[1];
      counts.packed += kept;
      ++counts.drawn;
    });
    counts.most_patches = std::max(counts.most_patches, patches);
  }
}

MultimodalDataset::MultimodalDataset(std::shared_ptr<const MultimodalIndex> index,
                                     std::pair<double, double> bounds, Split split,
                                     std::optional<int64_t> num_samples,
                                     const MultimodalDatasetOptions& options)
    : Dataset(gpt_columns(options.sequence_length, /*own_positions=*/true)),
      impl_(std::make_unique<Impl>()) {
  Impl& d = *impl_;
  d.index = std::move(index);
  d.split = split;
  d.options = options;
  std::tie(d.first, d.last) = split_range(bounds, d.index->size());
  MEGATRON_CHECK(d.first < d.last, d.index->path(), ": the ", to_string(split),
                 " split holds none of the ", d.index->size(), " samples");
  d.pixel_values = pixel_table(d.index->rules().processor.scaling);
  d.choose();
  MEGATRON_CHECK(!d.usable.empty(), d.index->path(), ": none of the ", d.counts.samples,
                 " samples of the ", to_string(split), " split can be used: ", d.counts.dropped,
                 " are longer than --seq-length, ", d.counts.silent, " have no token that counts");
  for (int64_t epoch = 0; epoch == 0 || d.sequences.size() < num_samples.value_or(0); ++epoch) {
    d.pack(epoch);
    if (epoch == 0) d.count_epoch();
  }
}

MultimodalDataset::~MultimodalDataset() = default;
int64_t MultimodalDataset::size() const { return impl_->sequences.size(); }
const MultimodalIndex& MultimodalDataset::index() const { return *impl_->index; }
const MultimodalCounts& MultimodalDataset::counts() const { return impl_->counts; }

std::vector<std::pair<std::string, int64_t>> MultimodalDataset::left_out() const {
  const MultimodalCounts& counts = impl_->counts;
  return {{"dropped_too_long", counts.dropped},
          {"dropped_without_counted_tokens", counts.silent},
          {"with_bad_media", counts.bad},
          {"cut", counts.cut}};
}

void MultimodalDataset::read(int64_t index, const SampleSpans& sample,
                             std::vector<int32_t>& document_starts) const {
  const Impl& d = *impl_;
  MEGATRON_CHECK(index >= 0 && index < size(), d.index->path(), ": there is no sample ", index,
                 " of ", size());
  const GPTSpans out(sample);
  document_starts.clear();
  size_t end = 0;
  int64_t position = 0;
  d.for_each_member(index, [&](int64_t member, int64_t begin, int64_t kept) {
    document_starts.push_back(static_cast<int32_t>(begin));
    const auto at = static_cast<size_t>(begin), count = static_cast<size_t>(kept);
    fuse(d.index->sample(member), d.options.fusion, out.tokens.subspan(at, count),
         out.labels.subspan(at, count), out.loss_mask.subspan(at, count));
    if (d.is_bad(member)) std::ranges::fill(out.loss_mask.subspan(at, count), 0.0F);
    std::iota(out.position_ids.begin() + begin, out.position_ids.begin() + begin + kept, 0);
    end = at + count;
    position = kept;
  });
  out.pad(end, position);
}

std::vector<SampleImage> MultimodalDataset::images(int64_t index) const {
  std::vector<SampleImage> out;
  for (const auto& [sample, medium] : impl_->places_of(MediaKind::kImage, index))
    out.push_back(sample_image(impl_->index->rules(), impl_->index->facts(sample, medium)));
  return out;
}

void MultimodalDataset::read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const {
  const MultimodalIndex& samples = *impl_->index;
  const auto [sample, medium] =
      impl_->places_of(MediaKind::kImage, index).at(static_cast<size_t>(image));
  constexpr uint8_t kGray = 128;
  if (samples.is_bad(sample, medium)) return std::ranges::fill(patches, kGray), void();
  const IndexedMedium place = samples.medium(sample, medium);
  const std::string bytes = samples.bytes(sample, medium);
  read_patches(samples.rules(),
               {{reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, place.name},
               place.facts.size, impl_->options.limits, patches);
}

std::vector<SampleSound> MultimodalDataset::sounds(int64_t index) const {
  std::vector<SampleSound> out;
  for (const auto& [sample, medium] : impl_->places_of(MediaKind::kSound, index))
    out.push_back(sample_sound(impl_->index->rules(), impl_->index->facts(sample, medium)));
  return out;
}

void MultimodalDataset::read_sound(int64_t index, int64_t sound, std::span<float> frames) const {
  const MultimodalIndex& samples = *impl_->index;
  const auto [sample, medium] =
      impl_->places_of(MediaKind::kSound, index).at(static_cast<size_t>(sound));
  if (samples.is_bad(sample, medium)) return std::ranges::fill(frames, 0.0F), void();
  const IndexedMedium place = samples.medium(sample, medium);
  const std::string bytes = samples.bytes(sample, medium);
  read_frames(samples.rules(),
              {{reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, place.name},
              place.facts.samples, impl_->options.limits, frames);
}

const PixelTable* MultimodalDataset::pixel_values() const { return &impl_->pixel_values; }

std::vector<SequenceRun> MultimodalDataset::runs(int64_t index) const {
  const Impl& d = *impl_;
  std::vector<SequenceRun> out;
  d.for_each_member(index, [&](int64_t member, int64_t begin, int64_t) {
    int64_t longer = 0;  // rows of earlier runs beyond their one id
    for (const MediaRun& run : d.index->sample(member).runs) {
      out.push_back({begin + run.token + longer, run.rows, member, run.medium});
      longer += run.rows - 1;
    }
  });
  return out;
}

std::string MultimodalDataset::description() const {
  return describe(json_quote(hash_text(impl_->index->description())));
}

std::string MultimodalDataset::details() const { return describe(impl_->index->details()); }

// `index`: JSON of what the samples are.
std::string MultimodalDataset::describe(const std::string& index) const {
  const Impl& d = *impl_;
  JsonWriter json;
  json.begin_object().member("class", "MultimodalDataset").key("index").raw(index);
  json.member("split", to_string(d.split)).member("first", d.first).member("last", d.last);
  json.member("sequence_length", d.options.sequence_length).member("random_seed", d.options.seed);
  json.member("long", static_cast<int64_t>(d.options.long_samples));
  json.member("loss_at_media", d.options.fusion.loss_at_media);
  json.member("most_patches", d.options.most_patches);
  json.member("shuffle_window", d.options.shuffle_window);
  if (d.index->repetitions().size() > 1 || d.index->repetitions()[0].times != 1) {
    json.key("repetitions").begin_array();
    for (const RepeatedSamples& part : d.index->repetitions())
      json.value(part.end).value(part.times);
    json.end_array();
  }
  json.end_object();
  return json.text();
}

}  // namespace megatron
