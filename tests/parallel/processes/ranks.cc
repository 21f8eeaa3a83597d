// One rank of processes_test.py: `ranks <case> <timeout in seconds> [token]` makes calls over Gloo
// and checks them, or fails in a given way. The rank that fails writes "failing" to standard output
// first. MEGATRON_TEST_DEVICE=cuda: over NCCL, each rank on the GPU of its local rank (build it
// with the gpu preset). The token only marks the process.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/comm/control.h"
#include "megatron/comm/failure_monitor.h"
#include "megatron/comm/peer_memory.h"
#include "megatron/comm/rendezvous.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

struct Rank {
  Launch launch;
  Connection connection;
  ProcessGroup world;
  at::Device device = at::kCPU;
};

// -- what works

// Values of a rank that differ everywhere, so that a swapped chunk shows.
at::Tensor values(int rank, int64_t count, at::ScalarType type) {
  const at::Tensor base = at::arange(count, at::kDouble) * 0.37 + rank * 1.7;
  return (at::isFloatingType(type) ? at::sin(base) * 100 : at::fmod(base * 10, 50)).to(type);
}

// NCCL sums in an order of its own.
void expect_close(const char* what, const at::Tensor& got, const at::Tensor& expected) {
  const double tolerance = at::isReducedFloatingType(got.scalar_type()) ? 3e-2 : 1e-5;
  MEGATRON_CHECK(
      got.sizes() == expected.sizes() &&
          at::allclose(got.to(at::kDouble), expected.to(at::kDouble), tolerance, 100 * tolerance),
      what, " over ", c10::toString(got.scalar_type()), " gives\n", got, "\nexpected\n", expected);
}

void expect_same(const char* what, const at::Tensor& got, const at::Tensor& expected) {
  MEGATRON_CHECK(got.sizes() == expected.sizes() && got.scalar_type() == expected.scalar_type() &&
                     (got.nbytes() == 0 ||
                      std::memcmp(got.data_ptr(), expected.data_ptr(), got.nbytes()) == 0),
                 what, " over ", c10::toString(got.scalar_type()), " gives\n", got, "\nexpected\n",
                 expected);
}

// Everything a rank computes with the verbs, in order.
std::vector<at::Tensor> use_verbs(const ProcessGroup& world, at::Device device) {
  std::vector<at::Tensor> results;
  const int rank = world.rank(), size = world.size();
  const auto values = [&](int of, int64_t count, at::ScalarType type) {
    return megatron::values(of, count, type).to(device);
  };
  const auto use_group = [&](const ProcessGroup& group, at::ScalarType type) {
    const int r = group.rank(), n = group.size();
    // The last one is reduced in chunks
    for (int64_t count : device.is_cpu() ? std::vector<int64_t>{0, 1, 7, 20001}
                                         : std::vector<int64_t>{1, 7, 20001}) {
      if (type != at::kByte) {
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          at::Tensor sum = values(rank, count, type);
          group.all_reduce(sum, op)->wait();
          at::Tensor part = at::empty({count}, sum.options());
          group.reduce_scatter(part, values(rank, n * count, type), op)->wait();
          results.insert(results.end(), {sum, part});
        }
      }
      const at::Tensor mine = values(rank, count, type);
      at::Tensor all = at::empty({n * count}, mine.options());
      group.all_gather(all, mine)->wait();
      at::Tensor from_last = mine.clone();
      group.broadcast(from_last, n - 1)->wait();
      results.insert(results.end(), {all, from_last});
    }
    // Rank i sends i + j + 1 rows to rank j, and rank 1 nothing to rank 0; then rank 1 neither
    // sends nor receives, then none does.
    for (const int idle : {0, 1, n}) {
      const auto rows = [&](int from, int to) -> int64_t {
        const bool none =
            idle == n || (from == 1 && (to == 0 || idle == 1)) || (idle == 1 && to == 1);
        return none ? 0 : from + to + 1;
      };
      std::vector<int64_t> sent, received;
      int64_t num_sent = 0, num_received = 0;
      for (int peer = 0; peer < n; ++peer) {
        sent.push_back(rows(r, peer));
        received.push_back(rows(peer, r));
        num_sent += sent.back();
        num_received += received.back();
      }
      const at::Tensor input = values(rank, num_sent * 3, type).view({num_sent, 3});
      at::Tensor output = at::empty({num_received, 3}, input.options());
      group.all_to_all(output, received, input, sent)->wait();
      results.push_back(output);
    }
    group.barrier();
  };
  for (at::ScalarType type :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte})
    use_group(world, type);
  // Subgroups: pairs, and the odd and even ranks in falling order.
  use_group(world.subgroup({rank / 2 * 2, rank / 2 * 2 + 1}, "pair"), at::kFloat);
  use_group(world.subgroup({rank % 2 + 2, rank % 2}, "parity"), at::kFloat);
  // A second one of the same name
  use_group(world.subgroup({rank % 2 + 2, rank % 2}, "parity"), at::kBFloat16);
  // A ring of messages, whose receives are posted before anything is sent.
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  // Each link is a group of its own, made in one order on all ranks.
  std::vector<ProcessGroup> links(2);
  for (int from = 0; from < size; ++from) {
    const int to = (from + 1) % size;
    if (rank != from && rank != to) continue;
    const ProcessGroup link = world.subgroup({from, to}, "link");
    links[rank == from ? 0 : 1] = link;
  }
  const at::TensorOptions on_device = at::TensorOptions(device);
  at::Tensor first = at::empty({5000}, on_device.dtype(at::kFloat)),
             second = at::empty({3}, on_device.dtype(at::kLong));
  std::vector<std::shared_ptr<Work>> works = {links[1].recv(first, 0), links[1].recv(second, 0)};
  works.push_back(links[0].send(values(rank, 5000, at::kFloat), 1));
  works.push_back(links[0].send(values(rank, 3, at::kLong), 1));
  for (const auto& work : works) work->wait();
  if (device.is_cpu()) {  // between any ranks of a group, and without a value
    at::Tensor third = at::empty({7}), empty = at::empty({0});
    works = {world.recv(third, previous), world.recv(empty, previous),
             world.send(values(rank, 7, at::kFloat), next), world.send(at::empty({0}), next)};
    for (const auto& work : works) work->wait();
    results.push_back(third);
  }
  results.insert(results.end(), {first, second});
  // Several calls under way at once, waited for in another order.
  at::Tensor a = values(rank, 9, at::kFloat), b = values(rank, 30000, at::kFloat);
  auto work_a = world.all_reduce(a), work_b = world.all_reduce(b);
  work_b->wait();
  work_a->wait();
  results.insert(results.end(), {a, b});
  return results;
}

// Ranks as processes give the bits that ranks as threads give; what those give is checked in
// comm_test.
void verbs(Rank& self) {
  std::vector<at::Tensor> expected;
  run_ranks(self.launch.world_size, [&](const std::shared_ptr<Backend>& backend) {
    const std::vector<at::Tensor> results = use_verbs(ProcessGroup(backend, "world"), at::kCPU);
    if (backend->rank() == self.launch.rank) expected = results;
  });
  // The tensors without a value, and the messages within a larger group
  if (!self.device.is_cpu()) {
    expected.erase(
        std::remove_if(expected.begin(), expected.end(),
                       [](const at::Tensor& t) { return t.numel() == 0 || t.numel() == 7; }),
        expected.end());
  }
  std::vector<at::Tensor> got = use_verbs(self.world, self.device);
  if (!self.device.is_cpu()) {
    got.erase(
        std::remove_if(got.begin(), got.end(), [](const at::Tensor& t) { return t.numel() == 7; }),
        got.end());
  }
  MEGATRON_CHECK(got.size() == expected.size(), "other numbers of results: ", got.size(), " and ",
                 expected.size());
  for (size_t i = 0; i < got.size(); ++i)
    (self.device.is_cpu() ? expect_same : expect_close)(cat("result ", i).c_str(), got[i].cpu(),
                                                        expected[i]);
  // And one sum by hand, so that not both are wrong.
  at::Tensor sum =
      at::full({2}, self.launch.rank + 1.0, at::TensorOptions(self.device).dtype(at::kFloat));
  self.world.all_reduce(sum)->wait();
  const double n = self.launch.world_size;
  expect_same("sum", sum.cpu(), at::full({2}, n * (n + 1) / 2, at::kFloat));
  // What a group refuses by itself.
  try {
    self.world.all_reduce(at::empty({4, 4}, at::TensorOptions(self.device)).t());
    throw_error("a strided tensor was taken");
  } catch (const Error& error) {
    MEGATRON_CHECK(std::string(error.what()) == "all_reduce takes contiguous tensors",
                   error.what());
  }
}

void control(Rank& self) {
  ControlChannel one(*self.connection.store, "one", self.launch.rank, self.launch.world_size, 10);
  ControlChannel other(*self.connection.store, "other", self.launch.rank, self.launch.world_size,
                       10);
  // Two threads, two channels, different speeds.
  std::thread background([&] {
    for (int i = 0; i < 20; ++i) other.broadcast("");
  });
  for (int i = 0; i < 20; ++i) {
    const std::vector<std::string> texts = one.gather(cat("text of ", self.launch.rank, " in ", i));
    if (self.launch.rank == 0) {
      for (int rank = 0; rank < self.launch.world_size; ++rank)
        MEGATRON_CHECK(texts.at(rank) == cat("text of ", rank, " in ", i), "gathered \"",
                       texts[rank], "\"");
    }
    MEGATRON_CHECK(one.broadcast(cat(self.launch.rank, " says ", i)) == cat("0 says ", i),
                   "broadcast");
  }
  background.join();
  // The elements of a store: who claims first, wins.
  const std::string winner =
      self.connection.store->claim("claimed", std::to_string(self.launch.rank));
  one.gather(winner);
  MEGATRON_CHECK(one.broadcast(winner) == winner, "two ranks hold the same claim");
}

// Processes on GPUs reach one another's memory; on CPUs all are told why not.
void peers(Rank& self) {
  constexpr int64_t kCount = 3 << 20;  // neither the start nor the whole of the allocator's segment
  const int rank = self.launch.rank, size = self.launch.world_size, next = (rank + 1) % size;
  const auto options = at::TensorOptions(self.device).dtype(at::kFloat);
  const at::Tensor before = at::zeros({kCount}, options),
                   buffer = at::full({kCount}, rank, options);
  const SharedMemory shared = share_memory(buffer, self.world);
  if (self.device.is_cpu()) {
    MEGATRON_CHECK(!shared.peers && shared.obstacle == "the ranks are processes on CPUs",
                   "shared: ", shared.obstacle);
    return;
  }
  MEGATRON_CHECK(shared.peers != nullptr, shared.obstacle);
  const at::Tensor got = at::empty_like(buffer);
  shared.peers->run([&] { shared.peers->read({{next, 0, got}}); })->wait();
  expect_same("what was read", got.cpu(), at::full({kCount}, next, at::kFloat));
  self.world.barrier();
  got.fill_(10 + rank);
  const at::Tensor half = got.narrow(0, 0, kCount / 2), token = at::zeros({1}, options);
  shared.peers
      ->run([&] {
        shared.peers->write({{next, kCount / 2, half}});
        self.world.all_reduce(token)->wait();
      })
      ->wait();
  const at::Tensor expected = at::full({kCount}, rank, at::kFloat);
  expected.narrow(0, kCount / 2, kCount / 2).fill_(10 + (rank + size - 1) % size);
  expect_same("what was written", buffer.cpu(), expected);
  expect_same("what lies beside it", before.cpu(), at::zeros({kCount}, at::kFloat));
  self.world.barrier();
}

// -- what fails

[[noreturn]] void loop_for_ever() {
  for (;;) std::this_thread::yield();
}

// Some steps of training in which rank `failing` does something else in step 3.
void steps(Rank& self, int failing, const std::function<void()>& fail) {
  for (int step = 0;; ++step) {
    if (step == 3 && self.launch.rank == failing) {
      std::printf("failing\n");
      std::fflush(stdout);
      fail();
    }
    at::Tensor gradients = at::ones({1000}, at::TensorOptions(self.device));
    self.world.all_reduce(gradients)->wait();
    gradients.sum().item();  // a GPU's rank comes to wait here
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Rank 3 is in a loop, rank 2 waits for its message, rank 1 for rank 2's, rank 0 for rank 1 in a
// collective.
void chain(Rank& self) {
  at::Tensor tensor = at::ones({16}, at::TensorOptions(self.device));
  const ProcessGroup pair =
      self.launch.rank < 2 ? self.world.subgroup({0, 1}, "tp") : ProcessGroup();
  self.world.barrier();
  if (self.launch.rank == 0) pair.all_reduce(tensor)->wait();
  if (self.launch.rank == 1) self.world.recv(tensor, 2)->wait();
  if (self.launch.rank == 2) self.world.recv(tensor, 3)->wait();
  std::printf("failing\n");
  std::fflush(stdout);
  loop_for_ever();
}

const std::map<std::string, std::function<void(Rank&)>>& cases() {
  static const std::map<std::string, std::function<void(Rank&)>> table = {
      {"verbs", verbs},
      {"control", control},
      {"peers", peers},
      {"throw-once",
       [](Rank& self) {  // the launcher starts the ranks a second time
         if (self.launch.restart_count == 0) steps(self, 2, [] { throw Error("not yet"); });
         verbs(self);
       }},
      {"throw",
       [](Rank& self) {
         steps(self, 2, [] { throw Error("the disk is full\nhint: delete something"); });
       }},
      {"throw-with-work-under-way",
       [](Rank& self) {
         steps(self, 2, [&] {
           const auto work = self.world.subgroup({1, 2}, "pair")
                                 .all_reduce(at::ones({8}, at::TensorOptions(self.device)));
           throw Error("the disk is full");
         });
       }},
      {"thread",
       [](Rank& self) {
         steps(self, 2,
               [] { std::thread([] { throw Error("the loader found no data"); }).join(); });
       }},
      {"kill", [](Rank& self) { steps(self, 2, [] { raise(SIGKILL); }); }},
      {"kill0", [](Rank& self) { steps(self, 0, [] { raise(SIGKILL); }); }},
      {"exit", [](Rank& self) { steps(self, 2, [] { _exit(0); }); }},
      {"stop", [](Rank& self) { steps(self, 2, [] { raise(SIGSTOP); }); }},
      {"stop0", [](Rank& self) { steps(self, 0, [] { raise(SIGSTOP); }); }},
      {"loop", [](Rank& self) { steps(self, 2, loop_for_ever); }},
      {"return",
       [](Rank& self) {
         // Leaves early, in good order; the others wait for it.
         for (int step = 0; self.launch.rank != 2 || step < 3; ++step)
           self.world.all_reduce(at::ones({1000}, at::TensorOptions(self.device)))->wait();
         std::printf("failing\n");
         std::fflush(stdout);
       }},
      {"op",
       [](Rank& self) {
         steps(self, 2, [&] {
           self.world
               .all_gather(at::empty({4000}, at::TensorOptions(self.device)),
                           at::ones({1000}, at::TensorOptions(self.device)))
               ->wait();
         });
       }},
      {"size",
       [](Rank& self) {
         steps(self, 2, [&] {
           self.world.all_reduce(at::ones({999}, at::TensorOptions(self.device)))->wait();
         });
       }},
      {"chain", chain},
  };
  return table;
}

int run(const std::string& name, double timeout_seconds) {
  Rank self;
  self.launch = launch_from_environment();
  CommConfig config;
  config.distributed_timeout_seconds_after_init = static_cast<int64_t>(timeout_seconds);
  if (const char* device = std::getenv("MEGATRON_TEST_DEVICE");
      device != nullptr && std::string(device) == "cuda") {
    self.device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(self.launch.local_rank));
    at::detail::getCUDAHooks().init();
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(self.device);
  }
  self.connection = connect(self.launch, config, self.device);
  FailureMonitor monitor(self.launch, self.connection, cat("tp 0 dp ", self.launch.rank),
                         config.timeout_seconds());
  try {
    self.world = ProcessGroup(self.connection.world, "world");
    // Connects the ranks, which may take seconds; as in training, the short limit follows
    self.world.barrier();
    monitor.set_timeout(config.timeout_seconds_after_init());
    cases().at(name)(self);
  } catch (const std::exception& error) {
    if (!monitor.fail(error)) std::fprintf(stderr, "error: %s\n", error.what());
    std::_Exit(monitor.failure_exit_code());
  }
  std::printf("done %d of %d\n", self.launch.rank, self.launch.world_size);
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  at::set_num_threads(1);
  try {
    return megatron::run(argv[1], std::atof(argv[2]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
