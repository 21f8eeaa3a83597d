#include "megatron/datasets/data_loader.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

HostAllocator heap() {
  return {.allocate = [](size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); },
          .deallocate = [](void* block, size_t) { std::free(block); }};
}

// All bits 0 is the number 0 in every element type.
void clear_weights(const SampleSpans& sample) {
  const Columns& columns = sample.columns();
  for (size_t i = 0; i < columns.size(); ++i)
    if (columns[i].is_loss_weight) std::memset(sample.data(i), 0, columns.row_bytes(i));
}

// A pool of reusable blocks of one size.
class BlockPool {
 public:
  BlockPool(HostAllocator allocator, size_t bytes)
      : allocator_(std::move(allocator)), bytes_(bytes) {}
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;
  ~BlockPool() {
    for (void* block : free_) allocator_.deallocate(block, bytes_);
  }

  void* take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        void* block = free_.back();
        free_.pop_back();
        return block;
      }
    }
    void* block = allocator_.allocate(bytes_);
    MEGATRON_CHECK(block != nullptr, "cannot allocate ", bytes_,
                   " bytes of host memory for a batch");
    return block;
  }
  void give(void* block) {
    const std::lock_guard lock(mutex_);
    free_.push_back(block);
  }
  size_t bytes() const { return bytes_; }

 private:
  HostAllocator allocator_;
  size_t bytes_;
  std::mutex mutex_;
  std::vector<void*> free_;
};

}  // namespace

struct DataLoader::Impl {
  // One slot of the queue: a batch, an error, or the end (neither).
  struct Slot {
    bool ready = false;
    std::shared_ptr<MicroBatch> batch;
    std::exception_ptr error;
  };

  std::shared_ptr<const Dataset> dataset;
  DataLoaderOptions options;
  std::shared_ptr<BlockPool> pool;
  // Of this rank; where media of all data-parallel ranks are divided together, of each of these
  std::vector<Sampler> samplers;

  std::mutex mutex;
  std::condition_variable space, ready;
  std::vector<Slot> slots;   // a ring; micro-batch n is in slot n % size
  int64_t next_to_read = 0;  // number of the micro-batch that a worker takes next
  int64_t next_to_return = 0;
  bool stopped = false;
  int64_t consumed = 0;
  std::vector<std::thread> workers;

  struct GlobalBatch {
    int64_t begin = 0, size = 0;
    // By sampler the rank's samples; empty: those that the samplers have
    std::vector<std::vector<int64_t>> samples;
  };
  std::mutex balance_mutex;
  std::deque<GlobalBatch> global_batches;  // the last ones, ascending

  Impl(std::shared_ptr<const Dataset> data, DataLoaderOptions opts)
      : dataset(std::move(data)), options(std::move(opts)) {
    SamplerConfig config = options.sampler;
    if (options.image_ranks.replicas == 0) samplers.emplace_back(config);
    for (int64_t rank = 0; rank < options.image_ranks.replicas; ++rank) {
      config.data_parallel_rank = rank;
      samplers.emplace_back(config);
    }
  }

  const Sampler& sampler() const { return samplers.front(); }  // but for its rank
  int64_t batch_size() const {
    return options.sampler.micro_batch_size * options.image_ranks.merged();
  }

  std::shared_ptr<MicroBatch> new_batch() const;
  // Those of the samples that it holds, divided among those of `all`, which hold its samples from
  // `first` on.
  BatchImages read_images(const MicroBatch& batch, std::span<const int64_t> all,
                          int64_t first) const;
  BatchSounds read_sounds(const MicroBatch& batch, std::span<const int64_t> all,
                          int64_t first) const;
  // Fills a batch with samples of `all`, those of all samplers, of which the first has the number
  // `number`.
  std::shared_ptr<MicroBatch> read_batch(const std::vector<int64_t>& all, int64_t number,
                                         int64_t start) const;
  // Its samples in the place of those that a sampler has for the micro-batch at `start`.
  void balance(int64_t start, size_t sampler, std::vector<int64_t>& ids);
  const GlobalBatch& global_batch_of(int64_t start);
  Slot load(int64_t number);
  void work();
  void stop();
};

std::shared_ptr<MicroBatch> DataLoader::Impl::new_batch() const {
  auto batch = std::make_unique<MicroBatch>(dataset->columns());
  batch->micro_batch_size = batch_size();
  batch->block = pool->take();
  batch->block_bytes = pool->bytes();
  return {batch.release(), [pool = pool](MicroBatch* done) {
            pool->give(done->block);
            delete done;
          }};
}

std::shared_ptr<MicroBatch> DataLoader::Impl::read_batch(const std::vector<int64_t>& all,
                                                         int64_t number, int64_t start) const {
  auto batch = new_batch();
  const int64_t size = batch->micro_batch_size,
                own = std::ssize(all) > size ? options.sampler.data_parallel_rank * size : 0;
  std::vector<int64_t> ids(all.begin() + own, all.begin() + own + size);
  const bool balanced = options.global_batch_size != nullptr;  // ids are numbers of type single
  batch->document_starts.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const SampleSpans out(batch->data(), static_cast<int64_t>(i));
    dataset->read(ids[i] == kPaddingSample ? 0 : ids[i], out, batch->document_starts[i]);
    if (ids[i] == kPaddingSample) clear_weights(out);
    if (batch->document_starts[i].size() > 1) batch->crosses_documents = false;
    batch->ordinals.push_back(balanced ? ids[i] : number + static_cast<int64_t>(i));
  }
  batch->sample_ids = std::move(ids);
  if (dataset->pixel_values() != nullptr) {
    batch->images = read_images(*batch, all, own);
    batch->sounds = read_sounds(*batch, all, own);
  }
  batch->consumed = start + sampler().samples_per_step();
  return batch;
}

namespace {

// Of a sample in the dataset.
int64_t index_in_dataset(int64_t id) { return id == kPaddingSample ? 0 : id; }

// The samples whose media are divided together, and those of them that the micro-batch holds.
struct DividedSamples {
  std::span<const int64_t> all;
  int64_t first, count;

  bool holds(int64_t i) const { return first <= i && i < first + count; }
};

// Divides the media of samples over the ranks of `out`, and reads those of this rank into
// `own`, one after another. `media`: those of an index of the dataset; `cost` and `size`, in
// elements of `own`, of one; `read`: one by index and number.
template <class Out, class T, class Media, class Cost, class Size, class Read>
void read_divided(const DividedSamples& samples, const Media& media, const Cost& cost,
                  const Size& size, const Read& read, Out& out, std::vector<T>& own) {
  std::vector<int64_t> numbers, costs;  // of each medium: in its sample
  std::vector<size_t> sizes;
  size_t before = 0;  // media of samples before those that are held
  for (int64_t i = 0; i < std::ssize(samples.all); ++i) {
    int64_t number = 0;
    for (auto& medium : media(index_in_dataset(samples.all[static_cast<size_t>(i)]))) {
      costs.push_back(cost(medium));
      if (i < samples.first) ++before;
      if (!samples.holds(i)) continue;
      sizes.push_back(static_cast<size_t>(size(medium)));
      out.all.push_back({i - samples.first, medium});
      numbers.push_back(number++);
    }
  }
  const std::vector<int> of_all = plan_images(costs, out.ranks.size);
  const std::span<const int> owners = std::span(of_all).subspan(before);
  size_t elements = 0;
  for (size_t k = 0; k < out.all.size(); ++k) {
    out.all[k].owner = owners[k];
    if (out.ranks.reads && owners[k] == out.ranks.rank) elements += sizes[k];
  }
  own.resize(elements);
  std::span<T> rest = own;
  for (size_t k = 0; k < out.all.size(); ++k) {
    if (!out.ranks.reads || owners[k] != out.ranks.rank) continue;
    read(index_in_dataset(samples.all[static_cast<size_t>(samples.first + out.all[k].sample)]),
         numbers[k], rest.first(sizes[k]));
    rest = rest.subspan(sizes[k]);
  }
}

}  // namespace

BatchSounds DataLoader::Impl::read_sounds(const MicroBatch& batch, std::span<const int64_t> all,
                                          int64_t first) const {
  BatchSounds out;
  out.ranks = options.image_ranks;
  read_divided(
      DividedSamples{all, first, batch.micro_batch_size},
      [&](int64_t index) { return dataset->sounds(index); }, options.media_costs.sound,
      [](const SampleSound& sound) { return sound.elements(); },
      [&](int64_t index, int64_t number, std::span<float> to) {
        dataset->read_sound(index, number, to);
      },
      out, out.frames);
  return out;
}

BatchImages DataLoader::Impl::read_images(const MicroBatch& batch, std::span<const int64_t> all,
                                          int64_t first) const {
  BatchImages out;
  out.pixel_values = *dataset->pixel_values();
  out.ranks = options.image_ranks;
  read_divided(
      DividedSamples{all, first, batch.micro_batch_size},
      [&](int64_t index) { return dataset->images(index); }, options.media_costs.image,
      [](const SampleImage& image) { return image.bytes(); },
      [&](int64_t index, int64_t number, std::span<uint8_t> to) {
        dataset->read_image(index, number, to);
      },
      out, out.patches);
  return out;
}

const DataLoader::Impl::GlobalBatch& DataLoader::Impl::global_batch_of(int64_t start) {
  // Micro-batches being read are fewer than slots apart, also of a worker that has just begun one
  const size_t kept = std::max<size_t>(slots.size(), 1);
  const auto plan = [&](int64_t begin) {
    GlobalBatch batch{begin, options.global_batch_size(begin), {}};
    MEGATRON_ASSERT(batch.size > 0 && batch.size % sampler().samples_per_step() == 0, batch.size);
    if (begin + batch.size > dataset->size()) return batch;  // the end is padded, and stays
    std::vector<int64_t> costs(static_cast<size_t>(batch.size), 0);
    const MediaCosts& cost_of = options.media_costs;
    for (int64_t i = 0; i < batch.size; ++i) {
      int64_t& cost = costs[static_cast<size_t>(i)];
      for (const SampleImage& image : dataset->images(begin + i)) cost += cost_of.image(image);
      for (const SampleSound& sound : dataset->sounds(begin + i)) cost += cost_of.sound(sound);
    }
    for (const Sampler& one : samplers)
      batch.samples.push_back(balanced_samples(costs, one.config().data_parallel_rank,
                                               one.config().data_parallel_size));
    return batch;
  };
  if (global_batches.empty()) global_batches.push_back(plan(options.consumed_samples));
  while (start >= global_batches.back().begin + global_batches.back().size)
    global_batches.push_back(plan(global_batches.back().begin + global_batches.back().size));
  while (global_batches.size() > kept) global_batches.pop_front();
  const auto found = std::ranges::find_if(
      global_batches, [&](const GlobalBatch& batch) { return start < batch.begin + batch.size; });
  MEGATRON_ASSERT(found->begin <= start, "sample ", start, " of a batch that has ended");
  return *found;
}

void DataLoader::Impl::balance(int64_t start, size_t sampler, std::vector<int64_t>& ids) {
  const std::lock_guard lock(balance_mutex);
  const GlobalBatch& batch = global_batch_of(start);
  if (batch.samples.empty()) return;
  const int64_t first = (start - batch.begin) / options.sampler.data_parallel_size;
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = batch.begin + batch.samples[sampler].at(static_cast<size_t>(first) + i);
}

// Micro-batch `number`, counted from the start of this loader.
DataLoader::Impl::Slot DataLoader::Impl::load(int64_t number) {
  Slot slot;
  slot.ready = true;
  try {
    const int64_t start = options.consumed_samples + number * sampler().samples_per_step();
    std::vector<int64_t> all;
    bool more = true;
    for (size_t k = 0; k < samplers.size() && more; ++k) {
      std::vector<int64_t> ids;
      {
        const std::lock_guard lock(mutex);  // the sampler caches the permutation of an epoch
        more = samplers[k].micro_batch(start, ids);
      }
      if (more && options.global_batch_size) balance(start, k, ids);
      all.insert(all.end(), ids.begin(), ids.end());
    }
    const SamplerConfig& config = options.sampler;
    const int64_t first = start + config.data_parallel_rank * config.micro_batch_size;
    if (more) slot.batch = read_batch(all, first, start);
  } catch (...) {
    slot.error = std::current_exception();
  }
  return slot;
}

void DataLoader::Impl::work() {
  std::unique_lock lock(mutex);
  const auto capacity = static_cast<int64_t>(slots.size());
  for (;;) {
    space.wait(lock, [&] { return stopped || next_to_read < next_to_return + capacity; });
    if (stopped) return;
    const int64_t number = next_to_read++;
    lock.unlock();
    Slot slot = load(number);
    const bool last = !slot.batch;
    lock.lock();
    slots[number % capacity] = std::move(slot);
    ready.notify_all();
    if (last) return;  // nothing follows the end or an error
  }
}

void DataLoader::Impl::stop() {
  {
    const std::lock_guard lock(mutex);
    stopped = true;
  }
  space.notify_all();
  for (std::thread& worker : workers) worker.join();
  workers.clear();
}

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, DataLoaderOptions options) {
  MEGATRON_CHECK(options.num_workers >= 0, "--num-workers is ", options.num_workers,
                 ", expected at least 0");
  options.sampler.total_samples = dataset->size();
  if (!options.allocator.allocate) options.allocator = heap();
  const size_t bytes = dataset->columns().block_bytes(options.sampler.micro_batch_size *
                                                      options.image_ranks.merged());
  auto pool = std::make_shared<BlockPool>(options.allocator, bytes);
  impl_ = std::make_shared<Impl>(std::move(dataset), std::move(options));
  impl_->pool = std::move(pool);
  impl_->consumed = impl_->options.consumed_samples;
  if (impl_->options.num_workers == 0) return;
  impl_->slots.resize(std::max(impl_->options.prefetch, impl_->options.num_workers));
  for (int64_t i = 0; i < impl_->options.num_workers; ++i)
    impl_->workers.emplace_back([impl = impl_.get()] { impl->work(); });
}

DataLoader::~DataLoader() { impl_->stop(); }

std::shared_ptr<const MicroBatch> DataLoader::next() {
  Impl::Slot slot;
  if (impl_->slots.empty()) {
    slot = impl_->load(impl_->next_to_return);
    if (slot.batch) ++impl_->next_to_return;
  } else {
    std::unique_lock lock(impl_->mutex);
    Impl::Slot& place = impl_->slots[impl_->next_to_return % impl_->slots.size()];
    impl_->ready.wait(lock, [&] { return place.ready; });
    if (place.batch) {
      slot = std::exchange(place, {});
      ++impl_->next_to_return;
      impl_->space.notify_all();
    } else {
      slot = place;  // an end or an error stays: later calls return it again
    }
  }
  if (slot.error) std::rethrow_exception(slot.error);
  if (slot.batch) impl_->consumed = slot.batch->consumed;
  return slot.batch;
}

int64_t DataLoader::consumed() const { return impl_->consumed; }
const Dataset& DataLoader::dataset() const { return *impl_->dataset; }

}  // namespace megatron
