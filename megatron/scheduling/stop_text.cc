#include "megatron/scheduling/stop_text.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

StopAutomaton::StopAutomaton(std::span<const std::string> texts) : nodes_(1) {
  for (size_t i = 0; i < texts.size(); ++i) {
    MEGATRON_ASSERT(!texts[i].empty(), "an empty stop text");
    lengths_.push_back(texts[i].size());
    int32_t at = 0;
    for (const char c : texts[i]) {
      const auto byte = static_cast<unsigned char>(c);
      int32_t next = edge(node(at), byte);
      if (next < 0) {
        next = static_cast<int32_t>(nodes_.size());
        auto& edges = nodes_[static_cast<size_t>(at)].edges;
        edges.emplace(
            std::ranges::lower_bound(edges, byte, {}, &std::pair<unsigned char, int32_t>::first),
            byte, next);
        const int32_t depth = node(at).depth + 1;
        nodes_.emplace_back();
        nodes_.back().depth = depth;
      }
      at = next;
    }
    int32_t& match = nodes_[static_cast<size_t>(at)].match;
    if (match < 0) match = static_cast<int32_t>(i);
  }
  // By depth, so that the state to fall back to is complete.
  std::vector<int32_t> pending = {0};
  for (size_t i = 0; i < pending.size(); ++i)
    for (const auto& [byte, child] : node(pending[i]).edges) {
      Node& below = nodes_[static_cast<size_t>(child)];
      if (pending[i] != 0) below.fail = next(node(pending[i]).fail, byte);
      if (below.match < 0) below.match = node(below.fail).match;
      pending.push_back(child);
    }
}

int32_t StopAutomaton::edge(const Node& node, unsigned char byte) {
  const auto found =
      std::ranges::lower_bound(node.edges, byte, {}, [](const auto& e) { return e.first; });
  return found != node.edges.end() && found->first == byte ? found->second : -1;
}

int32_t StopAutomaton::next(int32_t state, unsigned char byte) const {
  for (;; state = node(state).fail) {
    const int32_t next = edge(node(state), byte);
    if (next >= 0) return next;
    if (state == 0) return 0;
  }
}

std::string StopText::pass(std::string_view piece) {
  state_ = 0;
  return std::exchange(held_, {}) + std::string(piece);
}

std::string StopText::push(std::string_view piece) {
  if (match_ >= 0) return {};
  if (!automaton_) return std::string(piece);
  for (size_t i = 0; i < piece.size(); ++i) {
    state_ = automaton_->next(state_, static_cast<unsigned char>(piece[i]));
    match_ = automaton_->match(state_);
    if (match_ < 0) continue;
    held_.append(piece.substr(0, i + 1));
    if (!include_) held_.resize(held_.size() - automaton_->length(match_));
    return std::exchange(held_, {});
  }
  held_.append(piece);
  const size_t kept = static_cast<size_t>(automaton_->depth(state_));
  std::string final = held_.substr(0, held_.size() - kept);
  held_.erase(0, final.size());
  return final;
}

std::string StopText::finish() { return std::exchange(held_, {}); }

}  // namespace megatron
