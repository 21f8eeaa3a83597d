#include "megatron/datasets/data_loader.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/datasets/image_plan.h"

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
  Sampler sampler;

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
    std::vector<int64_t> own;  // this rank's samples; empty: those that the sampler has
  };
  std::mutex balance_mutex;
  std::deque<GlobalBatch> global_batches;  // the last ones, ascending

  Impl(std::shared_ptr<const Dataset> data, DataLoaderOptions opts)
      : dataset(std::move(data)), options(std::move(opts)), sampler(options.sampler) {}

  std::shared_ptr<MicroBatch> new_batch() const;
  // Those of the samples that it holds.
  BatchImages read_images(const MicroBatch& batch) const;
  BatchSounds read_sounds(const MicroBatch& batch) const;
  // Fills a batch with samples `ids`, of which the first has the number `first`.
  std::shared_ptr<MicroBatch> read_batch(std::vector<int64_t> ids, int64_t first,
                                         int64_t start) const;
  // Its samples in the place of those that the sampler has for the micro-batch at `start`.
  void balance(int64_t start, std::vector<int64_t>& ids);
  const GlobalBatch& global_batch_of(int64_t start);
  Slot load(int64_t number);
  void work();
  void stop();
};

std::shared_ptr<MicroBatch> DataLoader::Impl::new_batch() const {
  auto batch = std::make_unique<MicroBatch>(dataset->columns());
  batch->micro_batch_size = options.sampler.micro_batch_size;
  batch->block = pool->take();
  batch->block_bytes = pool->bytes();
  return {batch.release(), [pool = pool](MicroBatch* done) {
            pool->give(done->block);
            delete done;
          }};
}

std::shared_ptr<MicroBatch> DataLoader::Impl::read_batch(std::vector<int64_t> ids, int64_t first,
                                                         int64_t start) const {
  auto batch = new_batch();
  const bool balanced = options.global_batch_size != nullptr;  // ids are numbers of type single
  batch->document_starts.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const SampleSpans out(batch->data(), static_cast<int64_t>(i));
    dataset->read(ids[i] == kPaddingSample ? 0 : ids[i], out, batch->document_starts[i]);
    if (ids[i] == kPaddingSample) clear_weights(out);
    if (batch->document_starts[i].size() > 1) batch->crosses_documents = false;
    batch->ordinals.push_back(balanced ? ids[i] : first + static_cast<int64_t>(i));
  }
  batch->sample_ids = std::move(ids);
  if (dataset->pixel_values() != nullptr) {
    batch->images = read_images(*batch);
    batch->sounds = read_sounds(*batch);
  }
  batch->consumed = start + sampler.samples_per_step();
  return batch;
}

namespace {

// Of sample `sample` of a micro-batch in the dataset.
int64_t index_in_dataset(const MicroBatch& batch, int64_t sample) {
  const int64_t id = batch.sample_ids[static_cast<size_t>(sample)];
  return id == kPaddingSample ? 0 : id;
}

// Divides the media of a micro-batch over the ranks of `out`, and reads those of this rank into
// `own`, one after another. `media`: those of an index of the dataset; `cost` and `size`, in
// elements of `own`, of one; `read`: one by index and number.
template <class Out, class T, class Media, class Cost, class Size, class Read>
void read_divided(const MicroBatch& batch, const Media& media, const Cost& cost, const Size& size,
                  const Read& read, Out& out, std::vector<T>& own) {
  std::vector<int64_t> numbers, costs;  // of each medium: in its sample
  std::vector<size_t> sizes;
  for (int64_t i = 0; i < batch.micro_batch_size; ++i) {
    int64_t number = 0;
    for (auto& medium : media(index_in_dataset(batch, i))) {
      costs.push_back(cost(medium));
      sizes.push_back(static_cast<size_t>(size(medium)));
      out.all.push_back({i, medium});
      numbers.push_back(number++);
    }
  }
  const std::vector<int> owners = plan_images(costs, out.ranks.size);
  size_t elements = 0;
  for (size_t k = 0; k < out.all.size(); ++k) {
    out.all[k].owner = owners[k];
    if (out.ranks.reads && owners[k] == out.ranks.rank) elements += sizes[k];
  }
  own.resize(elements);
  std::span<T> rest = own;
  for (size_t k = 0; k < out.all.size(); ++k) {
    if (!out.ranks.reads || owners[k] != out.ranks.rank) continue;
    read(index_in_dataset(batch, out.all[k].sample), numbers[k], rest.first(sizes[k]));
    rest = rest.subspan(sizes[k]);
  }
}

}  // namespace

BatchSounds DataLoader::Impl::read_sounds(const MicroBatch& batch) const {
  BatchSounds out;
  out.ranks = options.image_ranks;
  read_divided(
      batch, [&](int64_t index) { return dataset->sounds(index); },
      [](const SampleSound& sound) { return sound.rows(); },
      [](const SampleSound& sound) { return sound.elements(); },
      [&](int64_t index, int64_t number, std::span<float> to) {
        dataset->read_sound(index, number, to);
      },
      out, out.frames);
  return out;
}

BatchImages DataLoader::Impl::read_images(const MicroBatch& batch) const {
  BatchImages out;
  out.pixel_values = *dataset->pixel_values();
  out.ranks = options.image_ranks;
  read_divided(
      batch, [&](int64_t index) { return dataset->images(index); },
      [](const SampleImage& image) { return image.patches(); },
      [](const SampleImage& image) { return image.bytes(); },
      [&](int64_t index, int64_t number, std::span<uint8_t> to) {
        dataset->read_image(index, number, to);
      },
      out, out.patches);
  return out;
}

const DataLoader::Impl::GlobalBatch& DataLoader::Impl::global_batch_of(int64_t start) {
  constexpr size_t kKept = 4;  // workers are in one batch, or in the next
  const auto plan = [&](int64_t begin) {
    GlobalBatch batch{begin, options.global_batch_size(begin), {}};
    const SamplerConfig& config = sampler.config();
    MEGATRON_ASSERT(batch.size > 0 && batch.size % sampler.samples_per_step() == 0, batch.size);
    if (begin + batch.size > dataset->size()) return batch;  // the end is padded, and stays
    std::vector<int64_t> costs(static_cast<size_t>(batch.size), 0);
    for (int64_t i = 0; i < batch.size; ++i) {
      int64_t& cost = costs[static_cast<size_t>(i)];
      for (const SampleImage& image : dataset->images(begin + i)) cost += image.patches();
      for (const SampleSound& sound : dataset->sounds(begin + i)) cost += sound.rows();
    }
    batch.own = balanced_samples(costs, config.data_parallel_rank, config.data_parallel_size);
    return batch;
  };
  if (global_batches.empty()) global_batches.push_back(plan(options.consumed_samples));
  while (start >= global_batches.back().begin + global_batches.back().size)
    global_batches.push_back(plan(global_batches.back().begin + global_batches.back().size));
  while (global_batches.size() > kKept) global_batches.pop_front();
  const auto found = std::ranges::find_if(
      global_batches, [&](const GlobalBatch& batch) { return start < batch.begin + batch.size; });
  MEGATRON_ASSERT(found->begin <= start, "sample ", start, " of a batch that has ended");
  return *found;
}

void DataLoader::Impl::balance(int64_t start, std::vector<int64_t>& ids) {
  const std::lock_guard lock(balance_mutex);
  const GlobalBatch& batch = global_batch_of(start);
  if (batch.own.empty()) return;
  const int64_t first = (start - batch.begin) / sampler.config().data_parallel_size;
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = batch.begin + batch.own.at(static_cast<size_t>(first) + i);
}

// Micro-batch `number`, counted from the start of this loader.
DataLoader::Impl::Slot DataLoader::Impl::load(int64_t number) {
  Slot slot;
  slot.ready = true;
  try {
    const int64_t start = options.consumed_samples + number * sampler.samples_per_step();
    std::vector<int64_t> ids;
    bool more;
    {
      const std::lock_guard lock(mutex);  // the sampler caches the permutation of an epoch
      more = sampler.micro_batch(start, ids);
    }
    if (more && options.global_batch_size) balance(start, ids);
    const SamplerConfig& config = sampler.config();
    const int64_t first = start + config.data_parallel_rank * config.micro_batch_size;
    if (more) slot.batch = read_batch(std::move(ids), first, start);
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
  const size_t bytes = dataset->columns().block_bytes(options.sampler.micro_batch_size);
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
