#include "megatron/tensor/batch_invariant/mode.h"

#include <atomic>

namespace megatron {
namespace {

std::atomic<bool> mode{false};

}  // namespace

void set_batch_invariant(bool on) { mode = on; }
bool is_batch_invariant() { return mode; }

}  // namespace megatron
