#include "megatron/comm/c10d_backend.h"

#define USE_C10D_GLOO  // the headers below are empty without these
#if MEGATRON_CUDA
#define USE_C10D_NCCL
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#endif

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#if MEGATRON_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/collective_history.h"
#include "megatron/comm/detail/element_type.h"
#include "megatron/comm/detail/reduce_in_order.h"
#include "megatron/comm/detail/serial_worker.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// A message of libtorch or Gloo, without stack frames and source locations.
std::string plain_message(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  const size_t place = text.find("] ");
  if (text.starts_with("[") && place != std::string::npos) text = text.substr(place + 2);
  return text;
}

// The identity of a group of processes, equal on all its ranks except for `rank`.
struct GroupIdentity {
  std::string name;
  std::vector<int> members;  // ranks of the job
  // Key prefix of the group in the store; differs between groups of equal name and members
  std::string path;
  int rank = 0;                     // in this group
  std::map<std::string, int> made;  // number of subgroups made, to tell equal ones apart

  int size() const { return static_cast<int>(members.size()); }
  std::string text() const { return group_text(name, members); }

  GroupIdentity subgroup(const std::vector<int>& ranks, const std::string& child_name) {
    GroupIdentity child;
    child.name = child_name;
    child.rank = -1;
    for (size_t i = 0; i < ranks.size(); ++i) {
      MEGATRON_CHECK(ranks[i] >= 0 && ranks[i] < size(), "subgroup with rank ", ranks[i],
                     " of a group of ", size(), " ranks");
      if (ranks[i] == rank) child.rank = static_cast<int>(i);
      child.members.push_back(members[ranks[i]]);
    }
    MEGATRON_CHECK(child.rank >= 0, "rank ", rank, " asks for the group ", child_name,
                   ", which it is no member of");
    std::string key = child_name;
    for (int member : child.members) key += cat(".", member);
    child.path = cat(path, "/", key, "#", ++made[key]);
    return child;
  }
};

GroupIdentity world_identity(const C10dOptions& options) {
  GroupIdentity world;
  world.name = "world";
  world.path = "groups/world";
  world.rank = options.rank;
  for (int rank = 0; rank < options.size; ++rank) world.members.push_back(rank);
  return world;
}

// -- Gloo

// What the ranks of a group compare before they move data.
struct CallHeader {
  enum Op : int32_t {
    kAllReduce,
    kAllGather,
    kReduceScatter,
    kAllToAll,
    kBroadcast,
    kBarrier,
    kMessage
  };
  int32_t op = kBarrier;
  int32_t type = 0;  // at::ScalarType
  int64_t count = 0;
  int64_t argument = 0;  // root, or the kind of reduction
  int64_t sequence = 0;

  bool operator==(const CallHeader&) const = default;
  std::string text() const {
    static constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter",
                                             "all_to_all", "broadcast",  "barrier",
                                             "message"};
    if (op == kBarrier) return "barrier";
    const auto scalar_type = static_cast<at::ScalarType>(type);
    std::string name = kNames[op];
    if (op == kBroadcast) name += cat(" from rank ", argument, " of the group");
    if ((op == kAllReduce || op == kReduceScatter) &&
        argument == static_cast<int64_t>(ReduceOp::kMax))
      name += " (max)";
    if (op == kAllToAll) return cat(name, " of ", element_type_name(scalar_type));
    return call_text(name, count, element_type_name(scalar_type),
                     count * static_cast<int64_t>(c10::elementSize(scalar_type)));
  }
};
static_assert(sizeof(CallHeader) == 32);

// A flat view of bytes; the caller keeps the memory alive.
at::Tensor bytes_at(void* data, int64_t bytes) { return at::from_blob(data, {bytes}, at::kByte); }
at::Tensor bytes_of(const at::Tensor& tensor) {
  return bytes_at(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()));
}

// The connections of one group, made when first needed. Used by the worker threads of a
// GlooBackend.
class GlooGroup {
 public:
  GlooGroup(std::shared_ptr<Store> store, GroupIdentity identity, C10dOptions options)
      : identity_(std::move(identity)), store_(std::move(store)), options_(std::move(options)) {}

  const GroupIdentity& identity() const { return identity_; }
  int size() const { return identity_.size(); }

  void gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor out = output, in = input;
    complete([&](c10d::ProcessGroupGloo& group) { return group._allgather_base(out, in); });
  }
  void exchange(const at::Tensor& output, std::vector<int64_t> output_counts,
                const at::Tensor& input, std::vector<int64_t> input_counts) {
    at::Tensor out = output, in = input;
    complete([&](c10d::ProcessGroupGloo& group) {
      return group.alltoall_base(out, in, output_counts, input_counts);
    });
  }
  void broadcast(const at::Tensor& bytes, int root) {
    std::vector<at::Tensor> tensors = {bytes};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    complete([&](c10d::ProcessGroupGloo& group) { return group.broadcast(tensors, options); });
  }
  // The header has its own tag, so that a payload of another size is never received into the wrong
  // memory.
  void send(CallHeader header, const at::Tensor& bytes, int peer) {
    std::vector<at::Tensor> head = {bytes_at(&header, sizeof header)}, body = {bytes};
    complete([&](c10d::ProcessGroupGloo& group) { return group.send(head, peer, 0); });
    if (bytes.numel() > 0)
      complete([&](c10d::ProcessGroupGloo& group) { return group.send(body, peer, 1); });
  }
  void recv(const CallHeader& expected, const at::Tensor& bytes, int peer) {
    CallHeader got;
    std::vector<at::Tensor> head = {bytes_at(&got, sizeof got)}, body = {bytes};
    complete([&](c10d::ProcessGroupGloo& group) { return group.recv(head, peer, 0); });
    if (got != expected)
      throw CollectiveError(cat("recv over ", identity_.text(), " from rank ",
                                identity_.members[peer], ", number ", expected.sequence,
                                ", expects a ", expected.text(), ", rank ", identity_.members[peer],
                                " sent a ", got.text()));
    if (bytes.numel() > 0)
      complete([&](c10d::ProcessGroupGloo& group) { return group.recv(body, peer, 1); });
  }

  // Throws the same CollectiveError on every rank when the ranks have made different calls.
  void compare(CallHeader mine) {
    std::vector<CallHeader> all(size());
    gather(bytes_at(all.data(), size() * static_cast<int64_t>(sizeof mine)),
           bytes_at(&mine, sizeof mine));
    // Each distinct call, with the global ranks that made it
    std::vector<std::pair<CallHeader, std::vector<int>>> kinds;
    for (int rank = 0; rank < size(); ++rank) {
      auto kind = std::find_if(kinds.begin(), kinds.end(),
                               [&](const auto& k) { return k.first == all[rank]; });
      if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {all[rank], {}});
      kind->second.push_back(identity_.members[rank]);
    }
    if (kinds.size() == 1) return;
    // The most common call is assumed to be right; the lowest rank that made another one is the
    // culprit.
    std::stable_sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) {
      return a.second.size() > b.second.size();
    });
    std::string text;
    for (const auto& [call, ranks] : kinds)
      text += cat(text.empty() ? "" : ", ", group_text(ranks.size() == 1 ? "rank" : "ranks", ranks),
                  " ", call.text());
    throw CollectiveError(cat("ranks of ", identity_.text(), " made different calls as number ",
                              mine.sequence, ": ", text),
                          kinds[1].second.front());
  }

 private:
  template <class Start>
  void complete(const Start& start) {
    c10d::ProcessGroupGloo& group = connected();
    c10::intrusive_ptr<c10d::Work> work;
    {
      std::lock_guard lock(starting_);
      work = start(group);
    }
    work->wait();
  }

  c10d::ProcessGroupGloo& connected() {
    std::call_once(connect_once_, [&] {
      auto options =
          c10d::ProcessGroupGloo::Options::create(to_milliseconds(options_.timeout_seconds));
      options->threads = 1;
      using Gloo = c10d::ProcessGroupGloo;
      options->devices.push_back(!options_.interface.empty()
                                     ? Gloo::createDeviceForInterface(options_.interface)
                                 : options_.loopback ? Gloo::createDeviceForHostname("127.0.0.1")
                                                     : Gloo::createDefaultDevice());
      // Groups are connected one after the other or at the same time, in orders of each rank's own
      connection_ = store_->view(identity_.path);
      connection_store_ = c10::intrusive_ptr<c10d::Store>::reclaim_copy(connection_->native());
      connection_store_->setTimeout(to_milliseconds(options_.timeout_seconds));
      group_ = c10::make_intrusive<Gloo>(connection_store_, identity_.rank, size(), options);
    });
    return *group_;
  }

  const GroupIdentity identity_;
  const std::shared_ptr<Store> store_;
  const C10dOptions options_;
  std::once_flag connect_once_;
  std::shared_ptr<Store> connection_;
  c10::intrusive_ptr<c10d::Store> connection_store_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  // c10d counts the calls of a group without locking, and lists all groups of the process in one
  // table, which it extends without locking, too (FlightRecorder::recordWithResetEnabled).
  inline static std::mutex starting_;
};

class GlooWork final : public Work {
 public:
  explicit GlooWork(std::shared_ptr<Task> task) : task_(std::move(task)) {}
  void wait() override { task_->wait(); }
  std::shared_ptr<const Progress> progress() const override { return task_; }

 private:
  std::shared_ptr<Task> task_;
};

// Tensors up to this size are summed after one all_gather instead of two exchanges.
constexpr int64_t kSmallReductionBytes = 32 << 10;

class GlooBackend final : public Backend {
 public:
  GlooBackend(std::shared_ptr<Store> store, GroupIdentity identity, C10dOptions options)
      : store_(store),
        identity_(identity),
        options_(options),
        group_(std::make_shared<GlooGroup>(std::move(store), std::move(identity),
                                           std::move(options))) {}

  int rank() const override { return identity_.rank; }
  int size() const override { return identity_.size(); }

  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    const DType dtype = check_cpu_tensor("all_reduce", tensor);
    const CallHeader header =
        next_call(CallHeader::kAllReduce, tensor, tensor.numel(), static_cast<int64_t>(op));
    return post("all_reduce", header, [group = group_, header, tensor, dtype, op] {
      group->compare(header);
      const int64_t count = tensor.numel(), bytes = static_cast<int64_t>(tensor.nbytes()),
                    size = group->size();
      if (count == 0) return;
      if (bytes <= kSmallReductionBytes) {
        std::vector<char> all(bytes * size);
        group->gather(bytes_at(all.data(), bytes * size), bytes_of(tensor));
        return reduce_parts(all, static_cast<char*>(tensor.data_ptr()), count, dtype, size, op);
      }
      // Each rank reduces one chunk; the last chunks may be shorter or empty.
      const int64_t width = size_of(dtype), chunk = (count + size - 1) / size;
      const auto chunk_count = [&](int64_t r) {
        return std::clamp<int64_t>(count - r * chunk, 0, chunk);
      };
      const int64_t mine = chunk_count(group->identity().rank);
      std::vector<int64_t> sent;
      for (int64_t r = 0; r < size; ++r) sent.push_back(chunk_count(r) * width);
      std::vector<char> parts(mine * width * size), reduced(chunk * width),
          all(chunk * width * size);
      group->exchange(bytes_at(parts.data(), mine * width * size),
                      std::vector<int64_t>(size, mine * width), bytes_of(tensor), sent);
      if (mine > 0) reduce_parts(parts, reduced.data(), mine, dtype, size, op);
      group->gather(bytes_at(all.data(), chunk * width * size),
                    bytes_at(reduced.data(), chunk * width));
      std::memcpy(tensor.data_ptr(), all.data(), bytes);
    });
  }

  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    check_pair("all_gather", output, input);
    MEGATRON_CHECK(output.numel() == size() * input.numel(), "all_gather of ", input.numel(),
                   " elements over ", size(), " ranks into ", output.numel(), " elements");
    const CallHeader header = next_call(CallHeader::kAllGather, input, input.numel(), 0);
    return post("all_gather", header, [group = group_, header, output, input] {
      group->compare(header);
      if (input.numel() > 0) group->gather(bytes_of(output), bytes_of(input));
    });
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    const DType dtype = check_pair("reduce_scatter", output, input);
    MEGATRON_CHECK(input.numel() == size() * output.numel(), "reduce_scatter of ", input.numel(),
                   " elements over ", size(), " ranks into ", output.numel(), " elements");
    const CallHeader header =
        next_call(CallHeader::kReduceScatter, output, output.numel(), static_cast<int64_t>(op));
    return post("reduce_scatter", header, [group = group_, header, output, input, dtype, op] {
      group->compare(header);
      const int64_t count = output.numel(), bytes = static_cast<int64_t>(output.nbytes()),
                    size = group->size();
      if (count == 0) return;
      std::vector<char> parts(bytes * size);
      const std::vector<int64_t> counts(size, bytes);
      group->exchange(bytes_at(parts.data(), bytes * size), counts, bytes_of(input), counts);
      reduce_parts(parts, static_cast<char*>(output.data_ptr()), count, dtype, size, op);
    });
  }

  // Sizes count rows: entries of the first dimension.
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    check_pair("all_to_all", output, input);
    scale_to_bytes("all_to_all output", output, output_sizes);
    scale_to_bytes("all_to_all input", input, input_sizes);
    const CallHeader header = next_call(CallHeader::kAllToAll, input, 0, 0);
    return post(
        "all_to_all", header, [group = group_, header, output, output_sizes, input, input_sizes] {
          group->compare(header);
          const GroupIdentity& identity = group->identity();
          const int64_t size = group->size(), width = static_cast<int64_t>(input.element_size());
          std::vector<int64_t> all(size * size);  // row r: what rank r sends to each
          std::vector<int64_t> mine = input_sizes;
          constexpr int64_t kWord = sizeof(int64_t);
          group->gather(bytes_at(all.data(), size * size * kWord),
                        bytes_at(mine.data(), size * kWord));
          int64_t total = 0;
          for (int64_t r = 0; r < size; ++r) {
            const int64_t sent = all[r * size + identity.rank];
            total +=
                std::accumulate(all.begin() + r * size, all.begin() + (r + 1) * size, int64_t{0});
            if (sent != output_sizes[r])
              throw CollectiveError(cat(
                  "all_to_all over ", identity.text(), ", number ", header.sequence, ": rank ",
                  identity.members[r], " sends ", sent / width, " elements to rank ",
                  identity.members[identity.rank], ", which expects ", output_sizes[r] / width));
          }
          if (total > 0)
            group->exchange(bytes_of(output), output_sizes, bytes_of(input), input_sizes);
        });
  }

  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    check_cpu_tensor("broadcast", tensor);
    const CallHeader header = next_call(CallHeader::kBroadcast, tensor, tensor.numel(), root);
    return post("broadcast", header, [group = group_, header, tensor, root] {
      group->compare(header);
      if (tensor.numel() > 0) group->broadcast(bytes_of(tensor), root);
    });
  }

  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    check_cpu_tensor("send", tensor);
    const CallHeader header = message(tensor, ++messages_sent_[peer]);
    return post_on(
        senders_[peer], cat("send to rank ", identity_.members[peer]), header,
        [group = group_, header, tensor, peer] { group->send(header, bytes_of(tensor), peer); });
  }

  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    check_cpu_tensor("recv", tensor);
    const CallHeader header = message(tensor, ++messages_received_[peer]);
    return post_on(
        receivers_[peer], cat("recv from rank ", identity_.members[peer]), header,
        [group = group_, header, tensor, peer] { group->recv(header, bytes_of(tensor), peer); });
  }

  void barrier() override {
    CallHeader header;
    header.sequence = ++calls_;
    post("barrier", header, [group = group_, header] { group->compare(header); })->wait();
  }

  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse) override {
    return std::make_shared<GlooBackend>(store_, identity_.subgroup(ranks, name), options_);
  }

 private:
  static void reduce_parts(const std::vector<char>& parts, char* output, int64_t count, DType dtype,
                           int64_t size, ReduceOp op) {
    std::vector<const char*> inputs;
    for (int64_t r = 0; r < size; ++r) inputs.push_back(parts.data() + r * count * size_of(dtype));
    reduce_in_order(inputs, output, count, dtype, op);
  }

  static DType check_pair(const char* what, const at::Tensor& output, const at::Tensor& input) {
    const DType dtype = check_cpu_tensor(what, output);
    MEGATRON_CHECK(check_cpu_tensor(what, input) == dtype, what, " from ",
                   element_type_name(input.scalar_type()), " to ", to_string(dtype));
    return dtype;
  }

  void scale_to_bytes(const char* what, const at::Tensor& tensor,
                      std::vector<int64_t>& sizes) const {
    MEGATRON_CHECK(static_cast<int>(sizes.size()) == size(), what, " takes ", size(),
                   " sizes, got ", sizes.size());
    const int64_t rows = tensor.size(0);
    int64_t sum = 0;
    for (int64_t size : sizes) sum += size;
    MEGATRON_CHECK(sum == rows, what, " has ", rows, " rows, its sizes sum to ", sum);
    const int64_t width = rows > 0 ? static_cast<int64_t>(tensor.nbytes()) / rows : 0;
    for (int64_t& size : sizes) size *= width;
  }

  CallHeader next_call(CallHeader::Op op, const at::Tensor& tensor, int64_t count,
                       int64_t argument) {
    return {op, static_cast<int32_t>(tensor.scalar_type()), count, argument, ++calls_};
  }
  static CallHeader message(const at::Tensor& tensor, int64_t sequence) {
    return {CallHeader::kMessage, static_cast<int32_t>(tensor.scalar_type()), tensor.numel(), 0,
            sequence};
  }

  template <class Body>
  std::shared_ptr<Work> post(const char* what, const CallHeader& header, Body body) {
    return post_on(collectives_, what, header, std::move(body));
  }
  template <class Body>
  std::shared_ptr<Work> post_on(SerialWorker& worker, std::string what, const CallHeader& header,
                                Body body) {
    return std::make_shared<GlooWork>(
        worker.post([group = group_, what = std::move(what), sequence = header.sequence,
                     body = std::move(body)] {
          try {
            body();
          } catch (const Error&) {
            throw;
          } catch (const std::exception& error) {
            throw CollectiveError(cat(what, " over ", group->identity().text(), ", number ",
                                      sequence, ", failed: ", plain_message(error)));
          }
        }));
  }

  std::shared_ptr<Store> store_;
  GroupIdentity identity_;
  C10dOptions options_;
  std::shared_ptr<GlooGroup> group_;
  int64_t calls_ = 0;
  std::map<int, int64_t> messages_sent_, messages_received_;  // by peer
  SerialWorker collectives_;
  std::map<int, SerialWorker> senders_, receivers_;  // by peer
};

// -- NCCL

#if MEGATRON_CUDA

static_assert(NCCL_MAJOR == 2 && NCCL_MINOR == 28,
              "libtorch 2.11.0 was built with NCCL 2.28, and its classes contain NCCL's structs");

// How much later than our own timeout c10d's watchdog ends the process.
constexpr double kWatchdogGraceSeconds = 20;

// Thread blocks of a kernel of a kConcurrent group; each fills an SM. A middle stage of a pipeline
// has at most seven operations in flight.
constexpr int kConcurrentBlocks = 4;

// Before wait(): c10d's own work. After it: an event on the waiting stream, because the work object
// holds tensors.
class NcclProgress final : public Progress {
 public:
  explicit NcclProgress(const c10::intrusive_ptr<c10d::Work>& work) : work_(work) {}

  bool finished() const override {
    std::lock_guard lock(mutex_);
    // Querying an event is legal while another thread captures a graph, but the driver must be told
    // so.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    bool done = true;
    try {
      if (event_) {
        done = event_->query();
      } else if (const auto work = work_.lock()) {
        done = work->isCompleted();
      }
    } catch (const std::exception&) {
      // The device has failed; the computing thread will get the error, too
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    return done;
  }

  // The current stream now waits for the operation. Inside a graph capture nothing can be tracked.
  void follow_current_stream() {
    std::lock_guard lock(mutex_);
    work_.reset();
    if (at::cuda::currentStreamCaptureStatusMayInitCtx() != at::cuda::CaptureStatus::None) return;
    event_.emplace();
    event_->record();
  }

 private:
  mutable std::mutex mutex_;
  c10::weak_intrusive_ptr<c10d::Work> work_;
  std::optional<at::cuda::CUDAEvent> event_;
};

class NcclWork final : public Work {
 public:
  NcclWork(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors)
      : work_(std::move(work)),
        tensors_(std::move(tensors)),
        progress_(std::make_shared<NcclProgress>(work_)) {}

  void wait() override {
    if (!work_) return;
    try {
      work_->wait();
    } catch (const std::exception& error) {
      throw CollectiveError(cat("a collective over NCCL failed: ", plain_message(error)));
    }
    progress_->follow_current_stream();
    tensors_.clear();
    work_.reset();
  }
  std::shared_ptr<const Progress> progress() const override { return progress_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<NcclProgress> progress_;
};

class NcclBackend final : public Backend {
 public:
  NcclBackend(std::shared_ptr<Store> store, GroupIdentity identity, C10dOptions options,
              CommunicatorUse use = CommunicatorUse::kExclusive)
      : store_(std::move(store)), identity_(std::move(identity)), options_(std::move(options)) {
    auto nccl = c10d::ProcessGroupNCCL::Options::create();
    nccl->timeout = to_milliseconds(options_.timeout_seconds + kWatchdogGraceSeconds);
    nccl->group_name = identity_.path;
    nccl->group_desc = identity_.text();
    if (use == CommunicatorUse::kConcurrent) nccl->config.maxCTAs = kConcurrentBlocks;
    for (int member : identity_.members)
      nccl->global_ranks_in_group.push_back(static_cast<uint64_t>(member));
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(
        identity_.path, c10::intrusive_ptr<c10d::Store>::reclaim_copy(store_->native()));
    group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(prefixed, identity_.rank, identity_.size(),
                                                         nccl);
  }

  // An orderly shutdown waits for the peers, communicator by communicator, but ranks destroy their
  // groups in different orders. So communicators are aborted instead, which waits for no rank. The
  // caller must have passed a barrier of the world after the last operation on the group. A failing
  // rank leaves its communicators to the end of the process.
  ~NcclBackend() override {
    if (std::uncaught_exceptions() > 0) {
      group_.release();
      return;
    }
    try {
      group_->abort();
    } catch (const std::exception&) {  // its operations have already reported the error
    }
  }

  int rank() const override { return identity_.rank; }
  int size() const override { return identity_.size(); }

  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    return start("all_reduce", {tensor}, [&] {
      std::vector<at::Tensor> tensors = {tensor};
      c10d::AllreduceOptions options;
      options.reduceOp = to_c10d(op);
      return group_->allreduce(tensors, options);
    });
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    return start("all_gather", {output, input},
                 [&] { return group_->_allgather_base(output, input); });
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    return start("reduce_scatter", {output, input}, [&] {
      c10d::ReduceScatterOptions options;
      options.reduceOp = to_c10d(op);
      return group_->_reduce_scatter_base(output, input, options);
    });
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    return start("all_to_all", {output, input},
                 [&] { return group_->alltoall_base(output, input, output_sizes, input_sizes); });
  }
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    return start("broadcast", {tensor}, [&] {
      std::vector<at::Tensor> tensors = {tensor};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return group_->broadcast(tensors, options);
    });
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    return start("send", {tensor}, [&] {
      std::vector<at::Tensor> tensors = {tensor};
      return group_->send(tensors, peer, 0);
    });
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    return start("recv", {tensor}, [&] {
      std::vector<at::Tensor> tensors = {tensor};
      return group_->recv(tensors, peer, 0);
    });
  }
  void barrier() override {
    start("barrier", {}, [&] { return group_->barrier(); })->wait();
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<NcclBackend>(store_, identity_.subgroup(ranks, name), options_, use);
  }

 private:
  static c10d::ReduceOp to_c10d(ReduceOp op) {
    return op == ReduceOp::kSum ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
  }

  template <class Start>
  std::shared_ptr<Work> start(const char* what, std::vector<at::Tensor> tensors,
                              const Start& begin) {
    for (const at::Tensor& tensor : tensors) {
      MEGATRON_CHECK(tensor.device().is_cuda(), what,
                     " over NCCL takes tensors on a GPU, got one on ", tensor.device().str());
      MEGATRON_CHECK(tensor.is_contiguous(), what, " takes contiguous tensors");
    }
    try {
      return std::make_shared<NcclWork>(begin(), std::move(tensors));
    } catch (const std::exception& error) {
      throw CollectiveError(
          cat(what, " over ", identity_.text(), " could not be started: ", plain_message(error)));
    }
  }

  std::shared_ptr<Store> store_;
  GroupIdentity identity_;
  C10dOptions options_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
};

#endif  // MEGATRON_CUDA

}  // namespace

std::shared_ptr<Backend> make_gloo_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options) {
  return std::make_shared<GlooBackend>(store, world_identity(options), options);
}

std::shared_ptr<Backend> make_nccl_backend(const std::shared_ptr<Store>& store,
                                           const C10dOptions& options) {
#if MEGATRON_CUDA
  // Groups that are made wait for their peers in calls of the store.
  const std::shared_ptr<Store> own = store->connection("nccl");
  own->native()->setTimeout(to_milliseconds(options.timeout_seconds));
  return std::make_shared<NcclBackend>(own, world_identity(options), options);
#else
  static_cast<void>(store);
  static_cast<void>(options);
  throw_error(
      "this program was built without CUDA, and NCCL needs GPUs\nhint: build the gpu preset, or "
      "give --distributed-backend gloo");
#endif
}

}  // namespace megatron
