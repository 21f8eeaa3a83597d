#include "megatron/nn/activation_offload.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/any_size_offload.h"
#include "megatron/nn/saved_tensors.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using Stream = HostCopies::Stream;

thread_local bool takes_any_size = false;  // while an AnySizeOffload lives

// The reload of one group.
struct Return {
  HostCopies::Mark arrived;
  bool waited = false;
};

// One offloaded block of memory, flat. Lives as long as a saved tensor refers to it.
struct Entry {
  Entry(std::shared_ptr<const HostCopies> copies, std::shared_ptr<ActivationOffloadCounts> counts)
      : copies(std::move(copies)), counts(std::move(counts)) {}
  ~Entry() {
    // Memory that is still being copied must not be reused.
    if (device.defined()) copies->wait(Stream::kComputing, leave);
    if (back && !back->waited) copies->wait(Stream::kComputing, back->arrived);
    if (host.defined()) counts->host_bytes -= static_cast<int64_t>(host.nbytes());
  }
  std::shared_ptr<const HostCopies> copies;
  std::shared_ptr<ActivationOffloadCounts> counts;
  at::Tensor device;  // set until offloaded, and again once the reload has started
  at::Tensor host;
  HostCopies::Mark leave;        // completion of the copy to the host
  std::shared_ptr<Return> back;  // null: reload not started
  size_t group = 0;
};

}  // namespace

AnySizeOffload::AnySizeOffload() : before_(std::exchange(takes_any_size, true)) {}
AnySizeOffload::~AnySizeOffload() { takes_any_size = before_; }

struct ActivationOffload::Impl {
  Impl(c10::Device device, const ActivationOffloadOptions& options)
      : options(options), copies(std::make_shared<HostCopies>(device)) {}

  // Frees the device memory of groups that ended before the last max_in_flight ticks.
  void tick() {
    leaving.emplace_back();
    while (static_cast<int64_t>(leaving.size()) > options.max_in_flight + 1) {
      for (const std::weak_ptr<Entry>& weak : leaving.front()) {
        const std::shared_ptr<Entry> entry = weak.lock();
        if (!entry || entry->back) continue;
        copies->wait(Stream::kComputing, entry->leave);
        entry->device.reset();
      }
      leaving.pop_front();
    }
  }

  const ActivationOffloadOptions options;
  const std::shared_ptr<const HostCopies> copies;
  const std::shared_ptr<ActivationOffloadCounts> counts =
      std::make_shared<ActivationOffloadCounts>();
  std::deque<std::vector<std::weak_ptr<Entry>>> leaving;  // by tick
};

ActivationOffload::ActivationOffload(c10::Device device, const ActivationOffloadOptions& options)
    : impl_(std::make_shared<Impl>(device, options)) {
  MEGATRON_ASSERT(options.max_in_flight >= 1, "no group may be in flight");
}
ActivationOffload::~ActivationOffload() = default;
const ActivationOffloadCounts& ActivationOffload::counts() const { return *impl_->counts; }

struct OffloadedPass::Impl : std::enable_shared_from_this<OffloadedPass::Impl> {
  explicit Impl(std::shared_ptr<ActivationOffload::Impl> to) : offload(std::move(to)), groups(1) {}

  struct Group {
    std::vector<std::weak_ptr<Entry>> entries;
    std::shared_ptr<Return> back;
  };

  bool takes(const at::Tensor& x) const {
    if (!x.defined() || x.numel() == 0) return false;
    if (!takes_any_size && x.numel() < offload->options.min_elements) return false;
    if (x.device() != offload->copies->device() || x.layout() != at::kStrided) return false;
    for (int64_t dim = 0; dim < x.dim(); ++dim)  // elements of expanded dimensions are stored once
      if (x.stride(dim) == 0 && x.size(dim) > 1) return false;
    return true;
  }

  // The entry of a flat tensor; reuses the current group's entry of the same memory.
  std::shared_ptr<Entry> add(const at::Tensor& flat) {
    for (const std::weak_ptr<Entry>& weak : groups.back().entries) {
      const std::shared_ptr<Entry> entry = weak.lock();
      if (entry && entry->device.defined() && entry->device.is_alias_of(flat) &&
          entry->device.data_ptr() == flat.data_ptr() && entry->device.numel() == flat.numel() &&
          entry->device.scalar_type() == flat.scalar_type())
        return entry;
    }
    const HostCopies& copies = *offload->copies;
    const auto entry = std::make_shared<Entry>(offload->copies, offload->counts);
    entry->device = flat;
    entry->host = copies.host_empty(flat.sizes(), flat.scalar_type());
    entry->group = groups.size() - 1;
    copies.wait(Stream::kToHost, copies.mark(Stream::kComputing));
    copies.copy(Stream::kToHost, entry->host, flat);
    entry->leave = copies.mark(Stream::kToHost);
    groups.back().entries.push_back(entry);
    offload->leaving.back().push_back(entry);
    ActivationOffloadCounts& counts = *offload->counts;
    ++counts.tensors;
    counts.bytes_to_host += static_cast<int64_t>(flat.nbytes());
    counts.host_bytes += static_cast<int64_t>(flat.nbytes());
    counts.most_host_bytes = std::max(counts.most_host_bytes, counts.host_bytes);
    return entry;
  }

  // Starts to reload a group.
  void call_back(size_t index) {
    Group& group = groups[index];
    if (group.back) return;
    group.back = std::make_shared<Return>();
    const HostCopies& copies = *offload->copies;
    std::vector<std::shared_ptr<Entry>> absent;
    for (const std::weak_ptr<Entry>& weak : group.entries) {
      const std::shared_ptr<Entry> entry = weak.lock();
      if (!entry) continue;
      entry->back = group.back;
      if (entry->device.defined()) {
        copies.wait(Stream::kComputing, entry->leave);
        continue;
      }
      entry->device = at::empty(entry->host.sizes(),
                                entry->host.options().device(copies.device()).pinned_memory(false));
      absent.push_back(entry);
    }
    // The destination may be memory that the compute stream has only just freed: wait for it.
    copies.wait(Stream::kFromHost, copies.mark(Stream::kComputing));
    for (const std::shared_ptr<Entry>& entry : absent) {
      copies.wait(Stream::kFromHost, entry->leave);
      copies.copy(Stream::kFromHost, entry->device, entry->host);
      offload->counts->bytes_from_host += static_cast<int64_t>(entry->host.nbytes());
    }
    group.back->arrived = copies.mark(Stream::kFromHost);
  }

  void call_back_before(size_t index) {
    while (index > 0)
      for (const std::weak_ptr<Entry>& entry : groups[--index].entries)
        if (!entry.expired()) return call_back(index);
  }

  // The entry's memory on the device, flat, ready for the compute stream.
  at::Tensor give(const std::shared_ptr<Entry>& entry) {
    if (!entry->back) {
      ++offload->counts->late_groups;
      call_back(entry->group);
    }
    if (!entry->back->waited) {
      offload->copies->wait(Stream::kComputing, entry->back->arrived);
      entry->back->waited = true;
      call_back_before(entry->group);
      // afterwards, so that the previous group, if still on the device, needs no reload
      offload->tick();
    }
    return entry->device;
  }

  // Takes over a saved tensor. A dense one is restored with its strides; others are made contiguous
  // first.
  std::function<at::Tensor()> keep(const at::Tensor& x) {
    const bool dense = x.is_non_overlapping_and_dense();
    const at::Tensor whole = dense ? x : x.contiguous();
    const std::shared_ptr<Entry> entry =
        add(at::as_strided(whole, {whole.numel()}, {1}, whole.storage_offset()));
    return [pass = shared_from_this(), entry, sizes = x.sizes().vec(),
            strides = whole.strides().vec()] {
      return at::as_strided(pass->give(entry), sizes, strides, 0);
    };
  }

  const std::shared_ptr<ActivationOffload::Impl> offload;
  std::deque<Group> groups;
};

OffloadedPass::OffloadedPass() = default;
OffloadedPass::OffloadedPass(OffloadedPass&&) noexcept = default;
OffloadedPass& OffloadedPass::operator=(OffloadedPass&&) noexcept = default;
OffloadedPass::~OffloadedPass() = default;

OffloadedPass::OffloadedPass(ActivationOffload& offload)
    : impl_(std::make_shared<Impl>(offload.impl_)) {
  offload.impl_->tick();
}

void OffloadedPass::begin_group() {
  if (!impl_) return;
  impl_->offload->tick();
  if (!impl_->groups.back().entries.empty()) impl_->groups.emplace_back();
}

std::function<at::Tensor()> OffloadedPass::keep(const at::Tensor& x) {
  const at::Tensor tensor = x.detach();
  if (!impl_ || !impl_->takes(tensor)) return [tensor] { return tensor; };
  return impl_->keep(tensor);
}

void OffloadedPass::begin_backward() {
  if (impl_) impl_->call_back_before(impl_->groups.size());
}

OffloadScope::OffloadScope(OffloadedPass* pass, Choose choose) {
  if (pass == nullptr || !pass->impl_) return;
  scope_ = std::make_unique<SavedTensorScope>(
      /*recomputing=*/false,
      [impl = pass->impl_,
       choose = std::move(choose)](const at::Tensor& saved) -> SavedTensorScope::Restore {
        if (!impl->takes(saved) || !choose(saved)) return {};
        return impl->keep(saved);
      });
}

OffloadScope::~OffloadScope() = default;

}  // namespace megatron
