// What messages of a conversation say: texts, or parts that are texts, images and sounds.
#pragma once

#include <cstdint>
#include <string>

#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/serving/detail/json_input.h"
#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"

namespace megatron {

// Reads them message by message. Media come within the request, in base64: nothing is fetched, and
// no file is read.
class MessageContents {
 public:
  // Keeps references to both.
  MessageContents(const ServedModel& model, const ServeLimits& limits)
      : model_(model), limits_(limits) {}

  // The texts of a message, joined, without its media. Throws ApiError.
  std::string read(JsonElement content, const std::string& where);
  // Ends the message that was read; `json`: the message without its content.
  void end_message(std::string json, bool is_assistant);
  // All of them with their media.
  MultimodalRow& row() { return row_; }

 private:
  void read_part(JsonObject& part, const std::string& where, std::string& joined);
  void add_medium(MediaKind kind, const std::string& type, JsonObject& part,
                  const std::string& where);
  void check_taken(MediaKind kind, const std::string& type, const std::string& where) const;
  std::string bytes_of(std::string_view base64, const std::string& where) const;

  const ServedModel& model_;
  const ServeLimits& limits_;
  MultimodalRow row_;
  RowMessage message_;
};

}  // namespace megatron
