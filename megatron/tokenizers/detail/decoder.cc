#include "megatron/tokenizers/detail/decoder.h"

#include <charconv>
#include <utility>

#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/normalizer.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

using Tokens = std::vector<std::string>;

void replace_all(std::string& text, std::string_view pattern, std::string_view content,
                 const GrowthLimit& limit) {
  if (text.find(pattern) == text.npos) return;
  std::string out;
  append_replaced(text, pattern, content, limit, out);
  text = std::move(out);
}

// For content that is not longer than the pattern.
void replace_all(std::string& text, std::string_view pattern, std::string_view content) {
  replace_all(text, pattern, content, {std::string::npos, ""});
}

size_t total_bytes(const Tokens& tokens) {
  size_t bytes = 0;
  for (const std::string& token : tokens) bytes += token.size();
  return bytes;
}

// The steps that can lengthen a text, applied to all its tokens.
class Replacer {
 public:
  Replacer(const DecoderStep& step, const Regex* regex, size_t most)
      : step_(step), regex_(regex), room_(most) {}

  void apply(std::string& token) {
    const GrowthLimit limit{room_, step_.where};
    std::string out;
    if (regex_ != nullptr)
      append_replaced(token, *regex_, step_.content, limit, out);
    else
      append_replaced(token, step_.pattern, step_.content, limit, out);
    limit.check(out.size());
    room_ -= out.size();
    token = std::move(out);
  }

 private:
  const DecoderStep& step_;
  const Regex* regex_;
  size_t room_;
};

// Source: `tokenizers` decoders/wordpiece.rs, cleanup().
void clean_up(std::string& text) {
  static constexpr std::pair<std::string_view, std::string_view> kRules[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [pattern, content] : kRules) replace_all(text, pattern, content);
}

// Joins the bytes of all tokens; tokens with characters outside the alphabet are kept as they are.
void fuse_byte_level(Tokens& tokens) {
  std::string bytes, part, text;
  for (const std::string& token : tokens) {
    bytes += parse_byte_level(token, part) ? part : token;
  }
  append_repaired_utf8(bytes, text);
  tokens.assign(1, std::move(text));
}

// Runs of byte tokens become text, or one U+FFFD per byte if they are not valid UTF-8.
void fuse_bytes(Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (valid_utf8_prefix(bytes) == bytes.size()) {
      out.push_back(bytes);
    } else {
      out.insert(out.end(), bytes.size(), "\xef\xbf\xbd");
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    if (const int byte = parse_byte_token(token); byte >= 0) {
      bytes += static_cast<char>(byte);
      continue;
    }
    flush();
    out.push_back(std::move(token));
  }
  flush();
  tokens = std::move(out);
}

void strip(const DecoderStep& step, std::string& token) {
  size_t begin = 0, end = token.size();
  const std::string& c = step.pattern;
  for (size_t i = 0; i < step.start && token.compare(begin, c.size(), c) == 0; ++i)
    begin += c.size();
  for (size_t i = 0; i < step.stop && end >= begin + c.size(); ++i) {
    if (token.compare(end - c.size(), c.size(), c) != 0) break;
    end -= c.size();
  }
  token = token.substr(begin, end - begin);
}

}  // namespace

int parse_byte_token(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return -1;
  int byte = -1;
  const auto [stop, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  return error == std::errc() && stop == token.data() + 5 ? byte : -1;
}

std::string byte_token(int byte) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return {'<',
          '0',
          'x',
          kDigits[static_cast<size_t>(byte >> 4)],
          kDigits[static_cast<size_t>(byte & 15)],
          '>'};
}

Decoder::Decoder(std::vector<DecoderStep> steps) : steps_(std::move(steps)) {
  for (const DecoderStep& step : steps_) {
    regexes_.push_back(step.kind == DecoderStep::Kind::kReplaceRegex
                           ? std::make_unique<Regex>(step.pattern, step.where)
                           : nullptr);
  }
}

std::string Decoder::decode(Tokens tokens) const {
  const size_t most = most_normalized_bytes(total_bytes(tokens));
  for (size_t i = 0; i < steps_.size(); ++i) {
    const DecoderStep& step = steps_[i];
    switch (step.kind) {
      case DecoderStep::Kind::kByteLevel:
        fuse_byte_level(tokens);
        break;
      case DecoderStep::Kind::kMetaspace:
        for (size_t t = 0; t < tokens.size(); ++t)
          replace_all(tokens[t], step.pattern, t == 0 && step.drop_first ? "" : " ");
        break;
      case DecoderStep::Kind::kWordPiece:
        for (size_t t = 0; t < tokens.size(); ++t) {
          if (t > 0) {
            if (tokens[t].starts_with(step.pattern)) {
              tokens[t].erase(0, step.pattern.size());
            } else {
              tokens[t].insert(tokens[t].begin(), ' ');
            }
          }
          if (step.cleanup) clean_up(tokens[t]);
        }
        break;
      case DecoderStep::Kind::kBpe:
        for (size_t t = 0; t < tokens.size(); ++t)
          replace_all(tokens[t], step.pattern, t + 1 == tokens.size() ? "" : " ");
        break;
      case DecoderStep::Kind::kByteFallback:
        fuse_bytes(tokens);
        break;
      case DecoderStep::Kind::kFuse: {
        std::string joined;
        for (const std::string& token : tokens) joined += token;
        tokens.assign(1, std::move(joined));
        break;
      }
      case DecoderStep::Kind::kStrip:
        for (std::string& token : tokens) strip(step, token);
        break;
      case DecoderStep::Kind::kReplaceString:
      case DecoderStep::Kind::kReplaceRegex: {
        Replacer replacer(step, regexes_[i].get(), most);
        for (std::string& token : tokens) replacer.apply(token);
        break;
      }
    }
  }
  std::string text;
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (steps_.empty() && t > 0) text += ' ';
    text += tokens[t];
  }
  return text;
}

std::string Decoder::piece(std::string_view token) const {
  std::string text(token);
  if (steps_.empty()) text.insert(text.begin(), ' ');
  bool fused = false;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const DecoderStep& step = steps_[i];
    std::string out;
    switch (step.kind) {
      case DecoderStep::Kind::kByteLevel:
        if (parse_byte_level(text, out)) text = out;
        fused = true;
        break;
      case DecoderStep::Kind::kMetaspace:
      case DecoderStep::Kind::kBpe:
        replace_all(text, step.pattern, " ");
        break;
      case DecoderStep::Kind::kWordPiece:
        if (text.starts_with(step.pattern)) {
          text.erase(0, step.pattern.size());
        } else {
          text.insert(text.begin(), ' ');
        }
        if (step.cleanup) clean_up(text);
        break;
      case DecoderStep::Kind::kByteFallback:
        if (const int byte = parse_byte_token(text); byte >= 0)
          return std::string(1, static_cast<char>(byte));
        break;
      case DecoderStep::Kind::kFuse:
        fused = true;
        break;
      case DecoderStep::Kind::kStrip:
        if (!fused) strip(step, text);  // else it applies to the ends of the text
        break;
      case DecoderStep::Kind::kReplaceString:
      case DecoderStep::Kind::kReplaceRegex:
        Replacer(step, regexes_[i].get(), most_normalized_bytes(token.size())).apply(text);
    }
  }
  return text;
}

}  // namespace megatron
