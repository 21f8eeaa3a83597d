// Rows of text with images and sound, whatever file they come from.
//
// A row is a JSON object in one of these forms:
//   conversations   [{"from": "human", "value": "<image>\nWhat is this?"}, ...], LLaVA's: in every
//                   value <image> and <audio> stand for the next medium, <image-2> for the second
//   messages        [{"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ...]
//                   as in OpenAI's API and in transformers. A part names its medium (image_url,
//                   audio_url, input_audio, image, audio, path or url) or takes the row's next one
//   document        texts and media in order, a list of parts as in messages
//   caption         a text that follows all media of the row
// with its media in image or images, audio or audios: paths, data: addresses, or objects with bytes
// (base64) or path; and may have tools and chat_template_kwargs (sources/conversation.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

enum class MediaKind { kImage, kSound };
const char* name_of(MediaKind kind);  // "image", "sound"

// Where a row says that a medium is: a path as the row has it, or bytes of the row itself.
struct RowMedium {
  MediaKind kind = MediaKind::kImage;
  std::string path;
  std::string bytes;
};

// Text, or the place of a medium.
struct RowPart {
  std::string text;
  int64_t medium = -1;  // in MultimodalRow::media; -1: text
};

struct RowMessage {
  std::string json;  // the message without its content
  bool is_assistant = false;
  std::vector<RowPart> parts;
  bool has_content = true;  // false: content is null or absent, as where a tool is called
};

struct MultimodalRow {
  std::vector<RowMessage> messages;  // empty: a document or a caption
  std::vector<RowPart> document;     // empty: messages or a caption
  std::string caption;               // follows all media
  std::string tools, variables;      // JSON; empty: none
  std::vector<RowMedium> media;      // in the order of their places
};

// `container`: the media that come with the row, such as members of an archive, in order. A path in
// the row then has to name one of them: by `path`, its last component, or the part of that behind
// the first dot. Throws Error whose message starts with `where`.
MultimodalRow parse_multimodal_row(std::string_view json, const std::string& where,
                                   const std::vector<RowMedium>& container = {});

// The media of a row that its image or images, audio or audios name, in order.
std::vector<RowMedium> parse_row_media(std::string_view json, const std::string& where);

// All media, then the caption.
MultimodalRow caption_row(std::string caption, std::vector<RowMedium> media,
                          const std::string& where);

// Throws Error if the text is no base64.
std::string decode_base64(std::string_view text, const std::string& where);

}  // namespace megatron
