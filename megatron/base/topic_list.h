// A configuration struct that inherits its fields from one plain struct per topic.
// docs/design/configuration.md
#pragma once

#include "megatron/base/fields.h"

namespace megatron {

// What the topics list and check, in their order. `shared` is what every topic may read of others.
template <class... Topic>
struct TopicList : Topic... {
  void visit_topics(FieldVisitor& visitor) { (Topic::fields(visitor), ...); }
  template <class... Shared>
  void validate_topics(Violations& v, const Shared&... shared) const {
    (Topic::validate(v, shared...), ...);
  }
};

}  // namespace megatron
