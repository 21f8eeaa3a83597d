#include "megatron/datasets/blended_dataset.h"

#include <algorithm>
#include <numeric>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/index_cache.h"

namespace megatron {
namespace {

constexpr int64_t kMaxMembers = 32767;

// The member with the largest error among those for which `may` holds; the lowest wins ties.
template <class May>
int64_t neediest(std::span<const double> weights, std::span<const int64_t> counts, int64_t i,
                 May may) {
  const double total = static_cast<double>(std::max<int64_t>(i, 1));
  int64_t best = -1;
  double best_error = 0;
  for (size_t d = 0; d < weights.size(); ++d) {
    if (!may(d)) continue;
    const double error = weights[d] * total - static_cast<double>(counts[d]);
    if (best < 0 || error > best_error) best = d, best_error = error;
  }
  return best;
}

template <class May>
BlendIndices interleave(std::span<const double> weights, int64_t size, May may_for) {
  MEGATRON_CHECK(!weights.empty() && static_cast<int64_t>(weights.size()) <= kMaxMembers,
                 "a blend has ", weights.size(), " datasets, expected 1 to ", kMaxMembers);
  BlendIndices out;
  out.dataset_ids.resize(size);
  out.sample_ids.resize(size);
  std::vector<int64_t> counts(weights.size());
  for (int64_t i = 0; i < size; ++i) {
    const int64_t member =
        neediest(weights, counts, i, [&](size_t d) { return may_for(d, counts[d]); });
    out.dataset_ids[i] = static_cast<int16_t>(member);
    out.sample_ids[i] = counts[member]++;
  }
  return out;
}

Columns columns_of(const std::vector<std::shared_ptr<const Dataset>>& members) {
  MEGATRON_CHECK(!members.empty(), "a blend needs at least one dataset");
  const Columns& columns = members[0]->columns();
  for (const auto& member : members) {
    MEGATRON_CHECK(member->sequence_length() == columns.sequence_length(),
                   "the datasets of a blend have sequence lengths ", columns.sequence_length(),
                   " and ", member->sequence_length());
    MEGATRON_CHECK(member->columns() == columns,
                   "the datasets of a blend have different columns: ", columns.text(), "; and ",
                   member->columns().text());
  }
  return columns;
}

// Number of samples of each member that the blend needs.
std::vector<int64_t> taken_from(std::span<const int16_t> dataset_ids,
                                std::span<const int64_t> sample_ids, size_t num_members) {
  MEGATRON_CHECK(dataset_ids.size() == sample_ids.size(), "the cached blend has ",
                 dataset_ids.size(), " members for ", sample_ids.size(),
                 " samples\nhint: remove the cache folder");
  std::vector<int64_t> taken(num_members);
  for (size_t i = 0; i < dataset_ids.size(); ++i) {
    const int64_t member = dataset_ids[i];
    MEGATRON_CHECK(member >= 0 && member < static_cast<int64_t>(num_members) && sample_ids[i] >= 0,
                   "the cached blend takes sample ", sample_ids[i], " of dataset ", member, " of ",
                   num_members, "\nhint: remove the cache folder");
    taken[member] = std::max(taken[member], sample_ids[i] + 1);
  }
  return taken;
}

}  // namespace

BlendIndices build_blending_indices(std::span<const double> weights, int64_t size) {
  return interleave(weights, size, [](size_t, int64_t) { return true; });
}

BlendIndices build_exhaustive_blending_indices(std::span<const int64_t> sizes) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<double> weights;
  for (const int64_t size : sizes)
    weights.push_back(static_cast<double>(size) / static_cast<double>(total));
  return interleave(weights, total, [&](size_t d, int64_t count) { return count < sizes[d]; });
}

struct BlendedDataset::Impl {
  std::vector<std::shared_ptr<const Dataset>> members;
  std::vector<double> weights;
  std::optional<int64_t> wanted;
  Split split;
  BlendIndices built;            // when the cache is not used
  std::vector<NpyArray> cached;  // dataset index, dataset sample index
  std::span<const int16_t> dataset_ids;
  std::span<const int64_t> sample_ids;
  std::vector<int64_t> taken;  // largest number taken from each member

  BlendIndices build() const;
  void load_indices(const std::string& description, const std::string& cache_path);
  std::string describe(std::string (Dataset::*of_member)() const) const;
  void check_members() const;
};

BlendIndices BlendedDataset::Impl::build() const {
  if (wanted) return build_blending_indices(weights, *wanted);
  std::vector<int64_t> sizes;
  for (const auto& member : members) sizes.push_back(member->size());
  return build_exhaustive_blending_indices(sizes);
}

void BlendedDataset::Impl::load_indices(const std::string& description,
                                        const std::string& cache_path) {
  static const std::string kNames[] = {"dataset_index", "dataset_sample_index"};
  // As in Megatron-LM, a blend is stored only if a cache folder was given.
  if (!cache_path.empty()) {
    const auto make = [&](const std::function<void(std::span<const CacheArray>)>& store) {
      const BlendIndices indices = build();
      const int64_t count = indices.dataset_ids.size();
      const CacheArray arrays[] = {
          {"dataset_index", "<i2", {count}, std::as_bytes(std::span(indices.dataset_ids))},
          {"dataset_sample_index", "<i8", {count}, std::as_bytes(std::span(indices.sample_ids))}};
      store(arrays);
    };
    IndexCache cache(cache_path, "BlendedDataset-" + to_string(split), description);
    cache.summarize_with([&](std::span<const NpyArray> arrays) {
      std::string text;
      for (const int64_t count :
           taken_from(arrays[0].as<int16_t>("<i2"), arrays[1].as<int64_t>("<i8"), members.size()))
        text += std::to_string(count) + " ";
      return text;
    });
    if (cache.get(kNames, make, cached)) {
      dataset_ids = cached[0].as<int16_t>("<i2");
      sample_ids = cached[1].as<int64_t>("<i8");
      std::istringstream counts(cache.summary());
      for (int64_t count; counts >> count;) taken.push_back(count);
      return;
    }
  }
  built = build();
  dataset_ids = built.dataset_ids;
  sample_ids = built.sample_ids;
  taken = taken_from(dataset_ids, sample_ids, members.size());
}

// The last sample taken from each member must exist.
void BlendedDataset::Impl::check_members() const {
  MEGATRON_CHECK(taken.size() == members.size() && dataset_ids.size() == sample_ids.size(),
                 "the cached blend is of ", taken.size(), " datasets, expected ", members.size(),
                 "\nhint: remove the cache folder");
  for (size_t d = 0; d < members.size(); ++d) {
    MEGATRON_CHECK(taken[d] <= members[d]->size(), "the blend takes ", taken[d],
                   " samples from dataset ", d, ", which holds ", members[d]->size(), ": ",
                   members[d]->description(), "\nhint: raise --mid-level-dataset-surplus");
  }
}

BlendedDataset::BlendedDataset(std::vector<std::shared_ptr<const Dataset>> members,
                               std::vector<double> weights, std::optional<int64_t> size,
                               Split split, const std::string& cache_path)
    : Dataset(columns_of(members)),
      impl_(new Impl{.members = std::move(members),
                     .weights = std::move(weights),
                     .wanted = size,
                     .split = split}) {
  if (size) {
    MEGATRON_ASSERT(impl_->weights.size() == impl_->members.size());
    impl_->weights = normalize_weights(impl_->weights);
  }
  impl_->load_indices(description(), cache_path);
  impl_->check_members();
}

BlendedDataset::~BlendedDataset() = default;

int64_t BlendedDataset::size() const { return impl_->dataset_ids.size(); }
const std::vector<std::shared_ptr<const Dataset>>& BlendedDataset::members() const {
  return impl_->members;
}

std::pair<int64_t, int64_t> BlendedDataset::locate(int64_t index) const {
  MEGATRON_CHECK(index >= 0 && index < size(), "there is no sample ", index, " in a blend of ",
                 size());
  return {impl_->dataset_ids[index], impl_->sample_ids[index]};
}

void BlendedDataset::read(int64_t index, const SampleSpans& out,
                          std::vector<int32_t>& document_starts) const {
  const auto [member, sample] = locate(index);
  impl_->members[member]->read(sample, out, document_starts);
}

std::vector<SampleImage> BlendedDataset::images(int64_t index) const {
  const auto [member, sample] = locate(index);
  return impl_->members[member]->images(sample);
}

void BlendedDataset::read_image(int64_t index, int64_t image, std::span<uint8_t> patches) const {
  const auto [member, sample] = locate(index);
  impl_->members[member]->read_image(sample, image, patches);
}

std::vector<SampleSound> BlendedDataset::sounds(int64_t index) const {
  const auto [member, sample] = locate(index);
  return impl_->members[member]->sounds(sample);
}

void BlendedDataset::read_sound(int64_t index, int64_t sound, std::span<float> frames) const {
  const auto [member, sample] = locate(index);
  impl_->members[member]->read_sound(sample, sound, frames);
}

const PixelTable* BlendedDataset::pixel_values() const {
  return impl_->members.front()->pixel_values();
}

std::vector<std::pair<std::string, int64_t>> BlendedDataset::left_out() const {
  std::vector<std::pair<std::string, int64_t>> out;
  for (const auto& member : impl_->members)
    for (const auto& [reason, count] : member->left_out()) {
      const auto same = std::ranges::find(out, reason, &std::pair<std::string, int64_t>::first);
      if (same == out.end())
        out.emplace_back(reason, count);
      else
        same->second += count;
    }
  return out;
}

std::string BlendedDataset::Impl::describe(std::string (Dataset::*of_member)() const) const {
  JsonWriter json;
  json.begin_object().member("class", "BlendedDataset").member("split", to_string(split));
  if (wanted) json.member("size", *wanted).member("weights", weights);
  json.key("datasets").begin_array();
  for (const auto& member : members) json.raw(((*member).*of_member)());
  json.end_array().end_object();
  return json.text();
}

std::string BlendedDataset::description() const { return impl_->describe(&Dataset::description); }
std::string BlendedDataset::details() const { return impl_->describe(&Dataset::details); }

}  // namespace megatron
