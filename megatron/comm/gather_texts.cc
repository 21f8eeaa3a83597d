#include "megatron/comm/gather_texts.h"

#include <cstring>

#include "megatron/tensor/torch.h"

namespace megatron {

std::vector<std::string> gather_texts(const ProcessGroup& group, at::Device device,
                                      const std::string& text) {
  constexpr int64_t kHead = sizeof(int64_t);  // the length, then the text
  const auto length = static_cast<int64_t>(text.size());
  const at::Tensor longest =
      at::full({1}, length, at::TensorOptions().dtype(at::kLong).device(device));
  group.all_reduce(longest, ReduceOp::kMax)->wait();
  const int64_t width = (kHead + longest.item<int64_t>() + kHead - 1) / kHead;  // in words
  at::Tensor own = at::zeros({width}, at::kLong);
  auto* bytes = static_cast<char*>(own.data_ptr());
  std::memcpy(bytes, &length, sizeof length);
  std::memcpy(bytes + kHead, text.data(), text.size());
  own = own.to(device);
  at::Tensor all = at::empty({group.size() * width}, own.options());
  group.all_gather(all, own)->wait();
  all = all.cpu();
  std::vector<std::string> texts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* row = static_cast<const char*>(all.const_data_ptr()) + rank * width * kHead;
    int64_t count = 0;
    std::memcpy(&count, row, sizeof count);
    texts.emplace_back(row + kHead, static_cast<size_t>(count));
  }
  return texts;
}

}  // namespace megatron
