#include "megatron/nn/saved_tensors.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>

#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

thread_local SavedTensorScope* recomputing_scopes = nullptr;
thread_local SavedTensorScope* other_scopes = nullptr;

}  // namespace

SavedTensorScope::Restore keep_saved(const at::Tensor& tensor) {
  const at::Tensor saved = tensor.detach();
  SavedTensorScope::Restore restore;
  for (const SavedTensorScope* scope = recomputing_scopes; scope != nullptr && !restore;
       scope = scope->outer_)
    restore = scope->keep_(saved);
  if (!restore && other_scopes != nullptr) restore = other_scopes->keep_(saved);
  if (!restore) restore = [saved] { return saved; };
  return restore;
}

namespace {

class SavedTensor final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override { restore_ = keep_saved(tensor); }
  at::Tensor call_unpack_hook() override { return restore_(); }

 private:
  SavedTensorScope::Restore restore_;
};

// New saved tensors ask the default engine for hooks; libtorch's C++ engine has none.
class EngineWithHooks final : public torch::autograd::Engine {
 public:
  // Forwards to libtorch's engine: only one engine of a process can have device threads.
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                     outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task,
      std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return get_base_engine().execute_with_graph_task(graph_task, std::move(graph_root),
                                                     std::move(input_buffer));
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (recomputing_scopes == nullptr && other_scopes == nullptr) return nullptr;
    return std::make_unique<SavedTensor>();
  }
};

torch::autograd::Engine& engine_with_hooks() {
  static auto* engine = new EngineWithHooks;  // never destroyed, like libtorch's
  return *engine;
}

void install_hooks() {
  static std::once_flag once;
  std::call_once(once, [] {
    at::SavedTensorDefaultHooks::lazy_initialize();
    torch::autograd::set_default_engine_stub(engine_with_hooks);
  });
}

}  // namespace

SavedTensorScope::SavedTensorScope(bool recomputing, Keep keep)
    : keep_(std::move(keep)),
      list_(recomputing ? &recomputing_scopes : &other_scopes),
      outer_(*list_) {
  install_hooks();
  *list_ = this;
}

SavedTensorScope::~SavedTensorScope() { *list_ = outer_; }

namespace {

// The memory of a tensor for as long as another tensor keeps it: autograd hands out tensors of its
// own over the memory of one that it was given.
struct WeakTensor {
  explicit WeakTensor(const at::Tensor& t)
      : memory(t.storage().getWeakStorageImpl()),
        options(t.options()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        offset(t.storage_offset()) {}
  at::Tensor lock() const {
    auto held = memory.lock();
    if (!held) return {};
    return at::empty({0}, options).set_(c10::Storage(std::move(held)), offset, sizes, strides);
  }
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  at::TensorOptions options;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

}  // namespace

SavedTensorScope::Restore recomputed(std::function<at::Tensor()> compute) {
  return [compute = std::move(compute), last = std::make_shared<std::optional<WeakTensor>>()] {
    const at::NoGradGuard no_grad;
    if (*last)
      if (const at::Tensor held = (*last)->lock(); held.defined()) return held;
    const at::Tensor again = compute();
    last->emplace(again);
    return again;
  };
}

}  // namespace megatron
