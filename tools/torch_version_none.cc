#include "tools/torch_version.h"

namespace megatron {

Versions torch_versions() { return {}; }

}  // namespace megatron
