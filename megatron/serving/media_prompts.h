// Images and sounds of conversations: what the server asks of a model that reads them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/scheduling/request.h"

namespace megatron {

// Ids with one for each feature of a medium; what is read in the place of the first of them.
struct MediaPrompt {
  std::string text;
  std::vector<int32_t> ids;
  std::shared_ptr<const GivenRows> rows;  // null: no media, or ids alone were asked for
};

// Thread safe.
class MediaPrompts {
 public:
  virtual ~MediaPrompts() = default;

  // Whether prompt() renders conversations: all of them, for their template may take parts alone.
  virtual bool renders() const = 0;
  // Why media of this kind are not read; empty: they are.
  virtual std::string refusal(MediaKind kind) const = 0;
  // "image" or "sound", in whose place features stand for this id; empty: that of a text.
  virtual std::string_view medium_of(int32_t id) const = 0;
  // The prompt for the model's next message; the media of `row` hold their bytes, and their places
  // as paths. `encode`: decode and encode them, too, which takes time. Throws Error for the client.
  virtual MediaPrompt prompt(const MultimodalRow& row, bool encode) = 0;
};

}  // namespace megatron
