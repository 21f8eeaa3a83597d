// Folders of what routers choose (training/experts/routing_files.h).
#pragma once

#include <string>

#include "megatron/base/fields.h"

namespace megatron {

struct RoutingFilesConfig {
  bool moe_enable_routing_replay = false;              // says that a folder is given
  std::string moe_routing_record, moe_routing_replay;  // empty: none

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
