// From a row with media to token ids.
//
// A chat template writes the placeholder of a medium where the row has a part of its kind; it gets
// the content as a list of parts, or, if it can only write texts, as a text with the placeholder in
// it. Then each placeholder is replaced by what the medium becomes (media_tokens.h), and the whole
// text is encoded. Only the template and the row's parts make placeholders: a text that holds the
// spelling of one, or of any special token, is an error, or is encoded as ordinary text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/datasets/multimodal/fused_tokens.h"
#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/datasets/sources/conversation.h"

namespace megatron {

// Thread safe. Keeps references to the tokenizer and the encoder, which must outlive it.
class MultimodalEncoder {
 public:
  MultimodalEncoder(const Tokenizer& tokenizer, const ConversationEncoder& conversations,
                    MediaRules rules, bool escape_literals);

  // `media`: of the row, in the order of their places. Throws Error that begins with `where`.
  EncodedSample encode(const MultimodalRow& row, const std::vector<MediumFacts>& media,
                       const std::string& where) const;

  // The conversation of a row for its template, a placeholder for each medium. Throws Error as
  // encode().
  Conversation conversation(const MultimodalRow& row, const std::string& where) const;
  // Ids of a text that a template made of conversation(), or any with the placeholders of the media
  // in their order.
  EncodedSample encode_rendered(const RenderedConversation& rendered, const MultimodalRow& row,
                                const std::vector<MediumFacts>& media,
                                const std::string& where) const;

  const MediaRules& rules() const { return rules_; }
  // Everything that ids and rows depend on; `in_full`: values instead of their hashes.
  std::string description(bool in_full = false) const;

 private:
  std::string checked_text(const std::string& text, const std::string& place) const;
  void check_members(const std::string& json, const std::string& place) const;
  bool takes_parts() const;
  RenderedConversation with_media(const RenderedConversation& rendered, const MultimodalRow& row,
                                  const std::vector<MediumFacts>& media, const std::string& where,
                                  std::vector<MediaRun>& runs) const;
  void encode_text(const RenderedConversation& rendered, std::vector<int32_t>& ids) const;
  const ModalityRule* rule_of(MediaKind kind) const;
  // The first spelling of a special token at or behind `from`; npos: there is none.
  std::pair<size_t, size_t> find_literal(std::string_view text, size_t from) const;

  const Tokenizer& tokenizer_;
  const ConversationEncoder& conversations_;
  MediaRules rules_;
  bool escape_literals_;
  std::vector<std::string> literals_;
  bool takes_parts_ = true;
};

}  // namespace megatron
