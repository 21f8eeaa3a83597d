// Finds texts that end a generation in text that comes in pieces.
//
// The text ends with the first stop text that is complete; of several that are complete at the same
// byte, with the longest. The result does not depend on how the text is cut into pieces.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megatron {

// All stop texts of a request in one automaton (Aho and Corasick 1975): a byte costs the same for
// one text as for 64. Immutable.
class StopAutomaton {
 public:
  // Not empty each.
  explicit StopAutomaton(std::span<const std::string> texts);

  // The state after one more byte; 0 is the start.
  int32_t next(int32_t state, unsigned char byte) const;
  // Bytes at the end of the text that may become a stop text.
  int32_t depth(int32_t state) const { return node(state).depth; }
  // The longest stop text that ends here; -1: none.
  int32_t match(int32_t state) const { return node(state).match; }
  size_t length(int32_t match) const { return lengths_[static_cast<size_t>(match)]; }

 private:
  struct Node {
    std::vector<std::pair<unsigned char, int32_t>> edges;  // ascending
    int32_t fail = 0;  // of the longest proper end that is a beginning, too
    int32_t depth = 0;
    int32_t match = -1;
  };
  const Node& node(int32_t state) const { return nodes_[static_cast<size_t>(state)]; }
  static int32_t edge(const Node& node, unsigned char byte);  // -1: none

  std::vector<Node> nodes_;
  std::vector<size_t> lengths_;  // of the texts
};

// One text. Pieces are whole UTF-8 characters, and so is what comes out, as stop texts are.
class StopText {
 public:
  // `texts`: null: there are none. `include`: the stop text is a part of the text.
  StopText(std::shared_ptr<const StopAutomaton> texts, bool include)
      : automaton_(std::move(texts)), include_(include) {}

  // The text that is final now, without looking for stop texts in the piece or across its end.
  std::string pass(std::string_view piece);
  // The text that is final now. Nothing more comes after a match.
  std::string push(std::string_view piece);
  // The rest, when the text ends for another reason.
  std::string finish();
  int32_t match() const { return match_; }  // index of the stop text; -1: none

 private:
  std::shared_ptr<const StopAutomaton> automaton_;
  bool include_;
  std::string held_;  // may be the beginning of a stop text
  int32_t state_ = 0;
  int32_t match_ = -1;
};

}  // namespace megatron
