#include "megatron/reporting/build_commit.h"

namespace megatron {

std::string build_commit() { return MEGATRON_COMMIT; }

}  // namespace megatron
