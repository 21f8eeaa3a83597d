#include "megatron/comm/peer_memory.h"

#include <unistd.h>

#if MEGATRON_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/detail/machine_id.h"
#include "megatron/kernels/copy_pieces.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Describes a rank's buffer to its peers. Sent as bytes.
struct Offer {
  char machine[192] = {};
  int64_t process = 0;
  int64_t device = -1;  // device index in this process; -1: host memory
  int64_t elements = 0;
  int64_t number = 0;                  // counts the offers of a process
  const at::Tensor* tensor = nullptr;  // for threads of the same process
  int64_t offset = 0;                  // bytes, from the start of the allocation of the handle
  int64_t handle_bytes = 0;            // 0: no handle
  char handle[256] = {};
};
static_assert(std::is_trivially_copyable_v<Offer>);

std::vector<Offer> exchange(const Offer& mine, const at::Tensor& buffer,
                            const ProcessGroup& group) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Offer));
  const at::Tensor host = at::empty({kBytes}, at::kByte);
  std::memcpy(host.data_ptr(), &mine, sizeof mine);
  const at::Tensor sent = host.to(buffer.device());
  const at::Tensor all = at::empty({group.size() * kBytes}, sent.options());
  group.all_gather(all, sent)->wait();
  const at::Tensor received = all.cpu();
  std::vector<Offer> offers(group.size());
  std::memcpy(static_cast<void*>(offers.data()), received.const_data_ptr(), received.nbytes());
  return offers;
}

// Broadcasts the obstacle of the lowest rank that has one; empty: no rank has one.
std::string agree(const std::string& obstacle, const at::Tensor& buffer,
                  const ProcessGroup& group) {
  constexpr int64_t kLongest = 256;
  const at::Tensor host = at::zeros({kLongest}, at::kByte);
  std::memcpy(host.data_ptr(), obstacle.data(), std::min<size_t>(obstacle.size(), kLongest - 1));
  const at::Tensor sent = host.to(buffer.device());
  const at::Tensor all = at::empty({group.size() * kLongest}, sent.options());
  group.all_gather(all, sent)->wait();
  const at::Tensor received = all.cpu();
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::string text = static_cast<const char*>(received.const_data_ptr()) + rank * kLongest;
    if (!text.empty()) return text;
  }
  return {};
}

void check_local(const at::Tensor& local, const at::Tensor& own) {
  MEGATRON_ASSERT(local.is_contiguous() && local.scalar_type() == own.scalar_type(), "a copy of ",
                  local.toString(), " with a buffer of ", own.toString());
}
void check_place(int rank, int64_t begin, int64_t count, const std::vector<int64_t>& elements) {
  MEGATRON_ASSERT(rank >= 0 && rank < static_cast<int>(elements.size()), "a copy from rank ", rank);
  MEGATRON_ASSERT(begin >= 0 && begin + count <= elements[rank], "a copy of ", count,
                  " elements at ", begin, " of ", elements[rank]);
}
void check_part(const PeerPart& part, const at::Tensor& local,
                const std::vector<int64_t>& elements) {
  check_place(part.rank, part.begin, part.count, elements);
  MEGATRON_ASSERT(part.from >= 0 && part.from + part.count <= local.numel(), "a copy of ",
                  part.count, " elements from ", part.from, " of ", local.numel());
}
void check_copy(const PeerCopy& copy, const at::Tensor& own, const std::vector<int64_t>& elements) {
  check_local(copy.local, own);
  check_place(copy.rank, copy.begin, copy.local.numel(), elements);
}

// -- threads

// Data is copied in wait(), and must not have changed since the start: over CUDA the result would
// be a mixture. What it was then is no tensor, and local tensors are kept until wait(), so that
// their allocator counts what it would count over CUDA.
class ThreadCopies final : public Work {
 public:
  void read(const at::Tensor& to, const at::Tensor& from, int rank) {
    const auto* bytes = static_cast<const std::byte*>(from.const_data_ptr());
    reads_.push_back({to, from, {bytes, bytes + from.nbytes()}, rank});
  }
  void keep(const at::Tensor& local) { written_.push_back(local); }

  void wait() override {
    for (const Read& read : reads_) {
      const bool same =
          read.started.empty() ||
          std::memcmp(read.from.const_data_ptr(), read.started.data(), read.started.size()) == 0;
      MEGATRON_ASSERT(same, "rank ", read.rank, " wrote what a peer was reading");
      read.to.copy_(read.from);
    }
    reads_.clear();
    written_.clear();
  }

 private:
  struct Read {
    at::Tensor to, from;
    std::vector<std::byte> started;
    int rank;
  };
  std::vector<Read> reads_;
  std::vector<at::Tensor> written_;
};

class ThreadPeers final : public PeerMemory {
 public:
  // `number`: unique to this object, the same on all ranks.
  ThreadPeers(std::vector<at::Tensor> buffers, const ProcessGroup& group, int64_t number)
      : buffers_(std::move(buffers)), group_(group), number_(number), rank_(group.rank()) {
    for (const at::Tensor& buffer : buffers_) elements_.push_back(buffer.numel());
  }

  std::shared_ptr<Work> run(const std::function<void()>& body) override {
    const auto copies = std::make_shared<ThreadCopies>();
    under_way_ = copies.get();
    try {
      body();
    } catch (...) {
      under_way_ = nullptr;
      throw;
    }
    under_way_ = nullptr;
    return copies;
  }
  void read(std::vector<PeerCopy> copies) override {
    for (const PeerCopy& copy : copies)
      under_way().read(copy.local.view({-1}), there(copy), copy.rank);
  }
  void write(std::vector<PeerCopy> copies) override {
    for (const PeerCopy& copy : copies) {
      there(copy).copy_(copy.local.view({-1}));
      under_way().keep(copy.local);
    }
  }
  void write_parts(const at::Tensor& local, const std::vector<PeerPart>& parts) override {
    check_local(local, buffers_[rank_]);
    const at::Tensor all = local.view({-1});
    for (const PeerPart& part : parts) {
      check_part(part, local, elements_);
      buffers_[part.rank]
          .view({-1})
          .narrow(0, part.begin, part.count)
          .copy_(all.narrow(0, part.from, part.count));
    }
    under_way().keep(local);
  }
  // Signals are sent as messages, which the receiver consumes in order until the one it waits for
  // arrives. Leftover messages of shared memory that no longer exists are skipped.
  void signal(int to, int64_t word, uint32_t value) override {
    group_.send(at::tensor({number_, word, static_cast<int64_t>(value)}, at::kLong), to)->wait();
  }
  void await(int from, int64_t word, uint32_t value) override {
    uint32_t& have = signals_[{from, word}];
    while (static_cast<int32_t>(have - value) < 0) {
      const at::Tensor message = at::empty({3}, at::kLong);
      group_.recv(message, from)->wait();
      const auto* fields = message.const_data_ptr<int64_t>();
      if (fields[0] == number_) signals_[{from, fields[1]}] = static_cast<uint32_t>(fields[2]);
    }
  }
  std::vector<void*> addresses() const override { return {}; }

 private:
  ThreadCopies& under_way() const {
    MEGATRON_ASSERT(under_way_ != nullptr, "copies are started inside run()");
    return *under_way_;
  }
  at::Tensor there(const PeerCopy& copy) const {
    check_copy(copy, buffers_[rank_], elements_);
    return buffers_[copy.rank].view({-1}).narrow(0, copy.begin, copy.local.numel());
  }

  std::vector<at::Tensor> buffers_;  // by rank (of the group)
  std::vector<int64_t> elements_;
  ProcessGroup group_;
  int64_t number_;
  int rank_;
  std::map<std::pair<int, int64_t>, uint32_t> signals_;  // by sender and word
  ThreadCopies* under_way_ = nullptr;
};

// -- GPUs

#if MEGATRON_CUDA

// Stream-ordered operations on memory words, from the driver library, which this program is not
// linked with.
struct StreamWords {
  using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
  Operation write = nullptr, wait = nullptr;
};
const StreamWords& stream_words() {
  static const StreamWords words = [] {
    const auto find = [](const char* name) {
      constexpr unsigned int kCuda12 = 12000;
      void* function = nullptr;
      cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion(name, &function, kCuda12, cudaEnableDefault, &found);
      MEGATRON_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess,
                     "the CUDA driver has no ", name, "\nhint: --no-peer-copies");
      return reinterpret_cast<StreamWords::Operation>(function);
    };
    return StreamWords{find("cuStreamWriteValue32"), find("cuStreamWaitValue32")};
  }();
  return words;
}

class DeviceCopies final : public Work {
 public:
  DeviceCopies(const c10::cuda::CUDAStream& stream, std::vector<at::Tensor> tensors)
      : tensors_(std::move(tensors)) {
    done_.record(stream);
  }
  // Memory of tensors freed here is reused only after the copies.
  ~DeviceCopies() override {
    if (pending_ && std::uncaught_exceptions() == 0) wait();
  }
  void wait() override {
    if (!std::exchange(pending_, false)) return;
    done_.block(c10::cuda::getCurrentCUDAStream(done_.device_index()));
    tensors_.clear();
  }

 private:
  std::vector<at::Tensor> tensors_;
  at::cuda::CUDAEvent done_;
  bool pending_ = true;
};

// From so many parts on, one kernel costs less than the copies' launches.
constexpr size_t kManyParts = 8;

class DevicePeers final : public PeerMemory {
 public:
  // Throws when a peer's memory cannot be mapped.
  DevicePeers(at::Tensor own, const std::vector<Offer>& offers, int rank)
      : own_(std::move(own)),
        rank_(rank),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, own_.device().index())) {
    const c10::cuda::CUDAGuard guard(own_.device());
    load_copy_pieces_cuda();
    for (int peer = 0; peer < static_cast<int>(offers.size()); ++peer) {
      const Offer& offer = offers[peer];
      elements_.push_back(offer.elements);
      if (peer == rank) {
        addresses_.push_back(static_cast<char*>(own_.data_ptr()));
      } else if (offer.process == getpid()) {
        if (offer.device != own_.device().index()) {
          const bool reached = at::cuda::get_p2p_access(
              own_.device().index(), static_cast<c10::DeviceIndex>(offer.device));
          TORCH_CHECK(reached, "no access between GPUs ", own_.device().index(), " and ",
                      offer.device);
        }
        threads_.push_back(*offer.tensor);
        addresses_.push_back(static_cast<char*>(offer.tensor->data_ptr()));
      } else {
        mappings_.push_back(c10::cuda::CUDACachingAllocator::getIpcDevPtr(
            std::string(offer.handle, offer.handle + offer.handle_bytes)));
        addresses_.push_back(static_cast<char*>(mappings_.back().get()) + offer.offset);
      }
    }
  }

  // Copies in flight end before the mappings do. A failing rank leaves both to the end of its
  // process: closing a mapping waits for the device, which may be waiting for a peer.
  ~DevicePeers() override {
    if (std::uncaught_exceptions() > 0) {
      static_cast<void>(new std::vector(std::move(mappings_)));
      return;
    }
    static_cast<void>(cudaStreamSynchronize(stream_.stream()));
  }

  std::shared_ptr<Work> run(const std::function<void()>& body) override {
    at::cuda::CUDAEvent now;
    now.record(c10::cuda::getCurrentCUDAStream(own_.device().index()));
    now.block(stream_);
    const c10::cuda::CUDAStreamGuard guard(stream_);
    body();
    return std::make_shared<DeviceCopies>(stream_, std::exchange(tensors_, {}));
  }
  void read(std::vector<PeerCopy> copies) override {
    for (PeerCopy& copy : copies) start(copy, copy.local.data_ptr(), address(copy));
  }
  void write(std::vector<PeerCopy> copies) override {
    for (PeerCopy& copy : copies) start(copy, address(copy), copy.local.const_data_ptr());
  }
  void write_parts(const at::Tensor& local, const std::vector<PeerPart>& parts) override {
    check_local(local, own_);
    check_device(local);
    const auto element = static_cast<int64_t>(own_.element_size());
    const auto* from = static_cast<const char*>(local.const_data_ptr());
    std::vector<PieceCopy> many;
    for (const PeerPart& part : parts) {
      check_part(part, local, elements_);
      const PieceCopy piece{from + part.from * element,
                            addresses_[part.rank] + part.begin * element, part.count * element};
      if (parts.size() >= kManyParts && fits_copy_pieces(piece))
        many.push_back(piece);
      else
        copy(part.rank, piece.to, piece.from, piece.bytes);
    }
    copy_pieces_cuda(many, stream_.stream());
    tensors_.push_back(local);
  }
  void signal(int to, int64_t word, uint32_t value) override {
    operate(stream_words().write, to, word, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  void await(int, int64_t word, uint32_t value) override {
    operate(stream_words().wait, rank_, word, value, CU_STREAM_WAIT_VALUE_GEQ);
  }
  std::vector<void*> addresses() const override { return {addresses_.begin(), addresses_.end()}; }

 private:
  void operate(StreamWords::Operation operation, int rank, int64_t word, uint32_t value,
               unsigned int flags) const {
    const auto place =
        reinterpret_cast<CUdeviceptr>(addresses_[rank] + word * static_cast<int64_t>(sizeof value));
    const CUresult result = operation(
        c10::cuda::getCurrentCUDAStream(own_.device().index()).stream(), place, value, flags);
    MEGATRON_CHECK(result == CUDA_SUCCESS, "a signal between rank ", rank_, " and rank ", rank,
                   " of a group could not be started: error ", static_cast<int>(result),
                   " of the CUDA driver");
  }
  char* address(const PeerCopy& copy) const {
    check_copy(copy, own_, elements_);
    return addresses_[copy.rank] + copy.begin * static_cast<int64_t>(own_.element_size());
  }
  void check_device(const at::Tensor& local) const {
    MEGATRON_ASSERT(local.device() == own_.device(), "a copy to or from another device than ",
                    own_.device().str(), " on ", local.device().str());
  }
  void copy(int rank, void* to, const void* from, int64_t bytes) const {
    const cudaError_t error =
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_.stream());
    MEGATRON_CHECK(error == cudaSuccess, "a copy to or from the memory of rank ", rank,
                   " of a group could not be started: ", cudaGetErrorString(error));
  }
  void start(PeerCopy& copied, void* to, const void* from) {
    check_device(copied.local);
    copy(copied.rank, to, from, static_cast<int64_t>(copied.local.nbytes()));
    tensors_.push_back(std::move(copied.local));
  }

  at::Tensor own_;
  int rank_;
  c10::cuda::CUDAStream stream_;
  std::vector<at::Tensor> tensors_;  // local tensors of the copies that run() starts
  std::vector<char*> addresses_;     // by rank
  std::vector<int64_t> elements_;
  std::vector<std::shared_ptr<void>> mappings_;
  std::vector<at::Tensor> threads_;
};

#endif  // MEGATRON_CUDA

Offer make_offer(const at::Tensor& buffer, std::string& obstacle) {
  Offer offer;
  const std::string machine = machine_id();
  std::memcpy(offer.machine, machine.data(), std::min(machine.size(), sizeof offer.machine - 1));
  static std::atomic<int64_t> offers = 0;
  offer.process = getpid();
  offer.number = offers++;
  offer.elements = buffer.numel();
  offer.tensor = &buffer;
  if (buffer.is_cpu()) return offer;
  offer.device = buffer.device().index();
#if MEGATRON_CUDA
  try {
    const c10::cuda::CUDAGuard guard(buffer.device());
    const auto shared =
        c10::cuda::CUDACachingAllocator::shareIpcHandle(buffer.storage().mutable_data());
    offer.offset =
        shared.offset + buffer.storage_offset() * static_cast<int64_t>(buffer.element_size());
    if (shared.handle.size() > sizeof offer.handle) {
      obstacle = "the allocator gives no handle that fits";
    } else {
      offer.handle_bytes = static_cast<int64_t>(shared.handle.size());
      std::memcpy(offer.handle, shared.handle.data(), shared.handle.size());
    }
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    obstacle = "its memory cannot be shared between processes: " + text.substr(0, text.find('\n'));
    static_cast<void>(cudaGetLastError());
  }
#else
  obstacle = "this program was built without CUDA";
#endif
  return offer;
}

// Why peer access is impossible between these ranks; empty if it may be possible.
std::string obstacle_between(const std::vector<Offer>& offers) {
  const Offer& first = offers.front();
  for (const Offer& offer : offers) {
    if (std::strcmp(offer.machine, first.machine) != 0) return "the ranks are on several hosts";
    if ((offer.device < 0) != (first.device < 0))
      return "some of the ranks are on GPUs and some are not";
    if (offer.device < 0 && offer.process != first.process)
      return "the ranks are processes on CPUs";
  }
  return {};
}

}  // namespace

SharedMemory share_memory(const at::Tensor& buffer, const ProcessGroup& group) {
  MEGATRON_ASSERT(buffer.is_contiguous(), "a shared buffer is contiguous");
  SharedMemory shared;
  std::string obstacle;
  const std::vector<Offer> offers = exchange(make_offer(buffer, obstacle), buffer, group);
  if (obstacle.empty()) obstacle = obstacle_between(offers);
  shared.obstacle = agree(obstacle, buffer, group);
  if (!shared.obstacle.empty()) return shared;
  if (buffer.is_cpu()) {
    std::vector<at::Tensor> buffers;
    for (const Offer& offer : offers) buffers.push_back(*offer.tensor);
    shared.peers = std::make_shared<ThreadPeers>(std::move(buffers), group, offers.front().number);
  }
#if MEGATRON_CUDA
  if (!buffer.is_cpu()) {
    try {
      shared.peers = std::make_shared<DevicePeers>(buffer, offers, group.rank());
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      obstacle = "a GPU cannot read the memory of another: " + text.substr(0, text.find('\n'));
      static_cast<void>(cudaGetLastError());
    }
  }
#endif
  // Offers must stay valid until every rank has opened them.
  shared.obstacle = agree(obstacle, buffer, group);
  if (!shared.obstacle.empty()) shared.peers = nullptr;
  return shared;
}

}  // namespace megatron
