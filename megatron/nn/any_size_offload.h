// Offloads saved activations whatever their size.
#pragma once

namespace megatron {

// While it lives, an OffloadedPass takes tensors of any size on this thread, those with fewer than
// ActivationOffloadOptions::min_elements as well: for layers whose rows differ from pass to pass,
// of which a pass with fewer rows shall not hold more on the device than one with more. May be
// nested.
class AnySizeOffload {
 public:
  AnySizeOffload();
  ~AnySizeOffload();
  AnySizeOffload(const AnySizeOffload&) = delete;
  AnySizeOffload& operator=(const AnySizeOffload&) = delete;

 private:
  const bool before_;
};

}  // namespace megatron
