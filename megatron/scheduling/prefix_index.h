// Which blocks hold the keys of which beginnings of sequences: a tree of blocks by their tokens.
//
// A block is found by a 128-bit keyed hash of its parent's key and its tokens; the tokens and the
// parent are compared at every hit, so that a collision costs a hit and never an answer.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace megatron {

// Prefixes are shared only among sequences that are equal in all of this.
struct PrefixIdentity {
  int32_t adapter = -1;
  int64_t weights_version = 0;
  bool long_rope = false;  // the frequencies of sequences beyond the border of longrope
  std::string salt;
  bool operator==(const PrefixIdentity&) const = default;
};

struct PrefixKey {
  uint64_t low = 0, high = 0;
  bool operator==(const PrefixKey&) const = default;
};

// A block of the tree, or the root of an identity; it may have left the tree since.
struct PrefixNode {
  int32_t index = -1;
  uint32_t generation = 0;
  explicit operator bool() const { return index >= 0; }
};

// What the index has of a sequence's beginning.
struct PrefixHit {
  std::vector<int32_t> blocks;  // full, from position 0 on
  PrefixNode last;              // of the last of them; null where there are none
  // A block whose first `partial_tokens` positions continue them; to be copied, as it has other
  // tokens after these or its owner writes on. -1: none.
  int32_t partial_block = -1;
  int64_t partial_tokens = 0;
};

// XXH3 with a secret that is drawn once per process.
PrefixKey hash_prefix(std::string_view bytes);

// Not thread safe.
class PrefixIndex {
 public:
  using Hash = PrefixKey (*)(std::string_view bytes);

  // `max_idle_share`: of `blocks`, that the idle blocks of one salt may take before they are the
  // first to be evicted.
  PrefixIndex(int32_t blocks, int64_t block_size, double max_idle_share = 1.0,
              Hash hash = hash_prefix);

  // Looks for at most `most` of the tokens.
  PrefixHit find(const PrefixIdentity& identity, std::span<const int32_t> tokens,
                 int64_t most) const;

  // Makes it if there is none; it goes with its last block. Null: a collision.
  PrefixNode root(const PrefixIdentity& identity);
  // Adds a held block that follows `parent`, with up to block_size tokens; only a full one can have
  // others that follow it. The node of these tokens, which is another block's if they were known;
  // null: a collision, or the parent has left the tree.
  PrefixNode add(PrefixNode parent, std::span<const int32_t> tokens, int32_t block);

  bool contains(int32_t block) const;  // whether a node has it
  // No sequence, or a sequence, holds the block of a node.
  void set_idle(int32_t block, bool idle);
  // Takes the least recently used idle block out of the tree, leaves first. Blocks that must leave
  // with it are appended too if they are idle. Appends nothing: no block is idle.
  void evict(std::vector<int32_t>& blocks);
  // Takes all out of the tree; appends the idle ones.
  void clear(std::vector<int32_t>& blocks);

  int64_t num_idle() const { return num_idle_; }
  int64_t num_blocks() const { return num_blocks_; }
  // Throws InternalError if the tree contradicts itself.
  void check() const;

 private:
  struct Node {
    uint32_t generation = 0;
    bool alive = false, idle = false;
    int32_t parent = -1, root = -1;
    int32_t block = -1;  // -1: a root
    PrefixKey key;
    std::vector<int32_t> tokens;
    std::vector<int32_t> children;  // ascending by their tokens
    uint64_t used = 0;              // when it last became idle
    // Roots alone
    PrefixIdentity identity;
    int64_t idle_blocks = 0;
    std::set<std::pair<uint64_t, int32_t>> idle_leaves;
  };
  struct KeyHash {
    size_t operator()(const PrefixKey& key) const { return static_cast<size_t>(key.low); }
  };

  Node& node(int32_t index) { return nodes_[static_cast<size_t>(index)]; }
  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  bool is_alive(PrefixNode reference) const;
  PrefixNode reference(int32_t index) const { return {index, node(index).generation}; }
  int32_t make_node();
  void drop_node(int32_t index);
  PrefixKey key_of(const PrefixIdentity& identity) const;
  PrefixKey key_of(const Node& parent, std::span<const int32_t> tokens) const;
  int32_t find_root(const PrefixIdentity& identity, const PrefixKey& key) const;
  // The child with exactly these tokens; -1: none.
  int32_t child(int32_t parent, std::span<const int32_t> tokens) const;
  size_t child_place(const Node& parent, std::span<const int32_t> tokens) const;
  std::pair<int32_t, int64_t> longest_common(int32_t parent, std::span<const int32_t> tokens) const;
  void enlist(int32_t index);
  void delist(int32_t index);
  void remove_tree(int32_t index, std::vector<int32_t>& blocks);

  int64_t block_size_;
  int64_t max_idle_of_root_;
  Hash hash_;
  std::deque<Node> nodes_;
  std::vector<int32_t> unused_;
  std::vector<int32_t> node_of_block_;
  std::unordered_map<PrefixKey, int32_t, KeyHash> by_key_;
  // Idle nodes by the time of their last use: leaves, and those with children.
  std::set<std::pair<uint64_t, int32_t>> idle_leaves_, idle_inner_;
  std::set<int32_t> crowded_;  // roots with more idle blocks than their share
  uint64_t clock_ = 0;
  int64_t num_idle_ = 0, num_blocks_ = 0;
};

}  // namespace megatron
