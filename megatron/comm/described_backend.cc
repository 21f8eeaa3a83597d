#include "megatron/comm/described_backend.h"

#include <algorithm>
#include <string>
#include <vector>

#include "megatron/base/check.h"

namespace megatron {
namespace {

class DescribedBackend final : public Backend {
 public:
  DescribedBackend(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::shared_ptr<Work> all_reduce(at::Tensor, ReduceOp) override { refuse("all_reduce"); }
  std::shared_ptr<Work> all_gather(at::Tensor, at::Tensor) override { refuse("all_gather"); }
  std::shared_ptr<Work> reduce_scatter(at::Tensor, at::Tensor, ReduceOp) override {
    refuse("reduce_scatter");
  }
  std::shared_ptr<Work> all_to_all(at::Tensor, std::vector<int64_t>, at::Tensor,
                                   std::vector<int64_t>) override {
    refuse("all_to_all");
  }
  std::shared_ptr<Work> broadcast(at::Tensor, int) override { refuse("broadcast"); }
  std::shared_ptr<Work> send(at::Tensor, int) override { refuse("send"); }
  std::shared_ptr<Work> recv(at::Tensor, int) override { refuse("recv"); }
  void barrier() override { refuse("barrier"); }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& /*name*/,
                                    CommunicatorUse /*use*/) override {
    const auto place = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return described_backend(static_cast<int>(place), static_cast<int>(ranks.size()));
  }

 private:
  [[noreturn]] void refuse(const char* verb) const {
    fail_invariant("ranks that communicate", std::source_location::current(),
                   cat(verb, " in a described group of ", size_, " ranks"));
  }

  const int rank_, size_;
};

}  // namespace

std::shared_ptr<Backend> described_backend(int rank, int size) {
  MEGATRON_ASSERT(rank >= 0 && rank < size, "rank ", rank, " of ", size);
  return std::make_shared<DescribedBackend>(rank, size);
}

}  // namespace megatron
