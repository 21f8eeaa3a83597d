// What `--device` says: a GPU of whatever model, of a certain model, or the CPU.
#pragma once

namespace megatron {

enum class DeviceChoice { kAuto, kCpu, kCuda, kH100, kH200, kB200 };

}  // namespace megatron
