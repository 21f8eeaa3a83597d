#include "megatron/scheduling/prefix_index.h"

#include <xxhash.h>

#include <algorithm>
#include <random>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Secret = std::array<unsigned char, 192>;

const Secret& process_secret() {
  static const Secret secret = [] {
    std::random_device random;
    Secret bytes;
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    return bytes;
  }();
  return secret;
}

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

PrefixKey hash_prefix(std::string_view bytes) {
  const Secret& secret = process_secret();
  const XXH128_hash_t hash =
      XXH3_128bits_withSecret(bytes.data(), bytes.size(), secret.data(), secret.size());
  return {hash.low64, hash.high64};
}

PrefixIndex::PrefixIndex(int32_t blocks, int64_t block_size, double max_idle_share, Hash hash)
    : block_size_(block_size),
      max_idle_of_root_(static_cast<int64_t>(max_idle_share * blocks)),
      hash_(hash),
      node_of_block_(static_cast<size_t>(blocks), -1) {}

bool PrefixIndex::is_alive(PrefixNode reference) const {
  return reference.index >= 0 && node(reference.index).alive &&
         node(reference.index).generation == reference.generation;
}

int32_t PrefixIndex::make_node() {
  if (unused_.empty()) {
    unused_.push_back(static_cast<int32_t>(nodes_.size()));
    nodes_.emplace_back();
  }
  const int32_t index = unused_.back();
  unused_.pop_back();
  const uint32_t generation = node(index).generation + 1;
  node(index) = {};
  node(index).generation = generation;
  node(index).alive = true;
  return index;
}

void PrefixIndex::drop_node(int32_t index) {
  Node& dropped = node(index);
  if (static_cast<int64_t>(dropped.tokens.size()) == block_size_ || dropped.block < 0) {
    const auto found = by_key_.find(dropped.key);
    if (found != by_key_.end() && found->second == index) by_key_.erase(found);
  }
  if (dropped.block >= 0) {
    node_of_block_[static_cast<size_t>(dropped.block)] = -1;
    --num_blocks_;
  }
  dropped.alive = false;
  unused_.push_back(index);
}

PrefixKey PrefixIndex::key_of(const PrefixIdentity& identity) const {
  std::string bytes;
  append(bytes, identity.adapter);
  append(bytes, identity.weights_version);
  append(bytes, identity.long_rope);
  bytes += identity.salt;
  return hash_(bytes);
}

PrefixKey PrefixIndex::key_of(const Node& parent, std::span<const int32_t> tokens) const {
  std::string bytes;
  bytes.reserve(sizeof parent.key + tokens.size_bytes());
  append(bytes, parent.key.low);
  append(bytes, parent.key.high);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
  return hash_(bytes);
}

int32_t PrefixIndex::find_root(const PrefixIdentity& identity, const PrefixKey& key) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return -1;
  const Node& root = node(found->second);
  return root.block < 0 && root.identity == identity ? found->second : -1;
}

PrefixNode PrefixIndex::root(const PrefixIdentity& identity) {
  const PrefixKey key = key_of(identity);
  if (const int32_t found = find_root(identity, key); found >= 0) return reference(found);
  if (by_key_.contains(key)) return {};
  const int32_t index = make_node();
  node(index).identity = identity;
  node(index).key = key;
  node(index).root = index;
  by_key_.emplace(key, index);
  return reference(index);
}

size_t PrefixIndex::child_place(const Node& parent, std::span<const int32_t> tokens) const {
  const auto before = [&](int32_t child, std::span<const int32_t> wanted) {
    return std::ranges::lexicographical_compare(node(child).tokens, wanted);
  };
  return static_cast<size_t>(
      std::lower_bound(parent.children.begin(), parent.children.end(), tokens, before) -
      parent.children.begin());
}

int32_t PrefixIndex::child(int32_t parent, std::span<const int32_t> tokens) const {
  if (static_cast<int64_t>(tokens.size()) == block_size_) {
    const auto found = by_key_.find(key_of(node(parent), tokens));
    if (found == by_key_.end()) return -1;
    const Node& candidate = node(found->second);
    return candidate.parent == parent && std::ranges::equal(candidate.tokens, tokens)
               ? found->second
               : -1;
  }
  const size_t place = child_place(node(parent), tokens);
  if (place == node(parent).children.size()) return -1;
  const int32_t candidate = node(parent).children[place];
  return std::ranges::equal(node(candidate).tokens, tokens) ? candidate : -1;
}

std::pair<int32_t, int64_t> PrefixIndex::longest_common(int32_t parent,
                                                        std::span<const int32_t> tokens) const {
  const std::vector<int32_t>& children = node(parent).children;
  const size_t place = child_place(node(parent), tokens);
  std::pair<int32_t, int64_t> best = {-1, 0};
  // Among sorted lists the longest common beginning is that of a neighbour.
  for (size_t i = place == 0 ? 0 : place - 1; i < std::min(place + 1, children.size()); ++i) {
    const std::vector<int32_t>& others = node(children[i]).tokens;
    const auto length = std::ranges::mismatch(others, tokens).in1 - others.begin();
    if (length > best.second) best = {children[i], length};
  }
  return best;
}

PrefixHit PrefixIndex::find(const PrefixIdentity& identity, std::span<const int32_t> tokens,
                            int64_t most) const {
  PrefixHit hit;
  int32_t at = find_root(identity, key_of(identity));
  if (at < 0) return hit;
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(std::max<int64_t>(0, most))));
  const auto block_size = static_cast<size_t>(block_size_);
  while (tokens.size() >= block_size) {
    const int32_t next = child(at, tokens.first(block_size));
    if (next < 0) break;
    at = next;
    hit.blocks.push_back(node(at).block);
    tokens = tokens.subspan(block_size);
  }
  if (!hit.blocks.empty()) hit.last = reference(at);
  const auto [partial, length] =
      longest_common(at, tokens.first(std::min(tokens.size(), block_size)));
  if (partial >= 0) {
    hit.partial_block = node(partial).block;
    hit.partial_tokens = length;
  }
  return hit;
}

PrefixNode PrefixIndex::add(PrefixNode parent, std::span<const int32_t> tokens, int32_t block) {
  if (!is_alive(parent)) return {};
  MEGATRON_ASSERT(!tokens.empty() && static_cast<int64_t>(tokens.size()) <= block_size_,
                  tokens.size(), " tokens in a block of ", block_size_);
  MEGATRON_ASSERT(!contains(block), "block ", block, " is in the index already");
  if (const int32_t known = child(parent.index, tokens); known >= 0) return reference(known);
  const bool full = static_cast<int64_t>(tokens.size()) == block_size_;
  const PrefixKey key = full ? key_of(node(parent.index), tokens) : PrefixKey{};
  if (full && by_key_.contains(key)) return {};
  const int32_t index = make_node();
  Node& added = node(index);
  added.parent = parent.index;
  added.root = node(parent.index).root;
  added.block = block;
  added.key = key;
  added.tokens.assign(tokens.begin(), tokens.end());
  if (full) by_key_.emplace(key, index);
  node_of_block_[static_cast<size_t>(block)] = index;
  ++num_blocks_;
  Node& above = node(parent.index);
  const bool was_idle = above.idle;
  if (was_idle) delist(parent.index);
  above.children.insert(
      above.children.begin() + static_cast<std::ptrdiff_t>(child_place(above, tokens)), index);
  if (was_idle) enlist(parent.index);
  return reference(index);
}

bool PrefixIndex::contains(int32_t block) const {
  return node_of_block_.at(static_cast<size_t>(block)) >= 0;
}

void PrefixIndex::enlist(int32_t index) {
  Node& entering = node(index);
  const std::pair<uint64_t, int32_t> place = {entering.used, index};
  Node& root = node(entering.root);
  if (entering.children.empty()) {
    idle_leaves_.insert(place);
    root.idle_leaves.insert(place);
  } else {
    idle_inner_.insert(place);
  }
}

void PrefixIndex::delist(int32_t index) {
  const std::pair<uint64_t, int32_t> place = {node(index).used, index};
  idle_leaves_.erase(place);
  idle_inner_.erase(place);
  node(node(index).root).idle_leaves.erase(place);
}

void PrefixIndex::set_idle(int32_t block, bool idle) {
  const int32_t index = node_of_block_.at(static_cast<size_t>(block));
  MEGATRON_ASSERT(index >= 0, "block ", block, " is not in the index");
  Node& changed = node(index);
  MEGATRON_ASSERT(changed.idle != idle, "block ", block, " was ", idle ? "" : "not ", "idle");
  Node& root = node(changed.root);
  changed.idle = idle;
  num_idle_ += idle ? 1 : -1;
  root.idle_blocks += idle ? 1 : -1;
  if (root.idle_blocks > max_idle_of_root_)
    crowded_.insert(changed.root);
  else
    crowded_.erase(changed.root);
  if (idle) {
    changed.used = ++clock_;
    enlist(index);
  } else {
    delist(index);
  }
}

void PrefixIndex::remove_tree(int32_t index, std::vector<int32_t>& blocks) {
  if (const int32_t parent = node(index).parent; parent >= 0) {
    const bool was_idle = node(parent).idle;
    if (was_idle) delist(parent);
    std::erase(node(parent).children, index);
    if (was_idle) enlist(parent);
  }
  std::vector<int32_t> pending = {index};
  const int32_t root = node(index).root;
  while (!pending.empty()) {
    const int32_t next = pending.back();
    pending.pop_back();
    const std::vector<int32_t>& children = node(next).children;
    pending.insert(pending.end(), children.begin(), children.end());
    if (next == root) continue;
    if (node(next).idle) {
      blocks.push_back(node(next).block);
      set_idle(node(next).block, false);
    }
    drop_node(next);
  }
  if (index == root || node(root).children.empty()) {
    crowded_.erase(root);
    drop_node(root);
  }
}

void PrefixIndex::evict(std::vector<int32_t>& blocks) {
  for (const int32_t root : crowded_)
    if (!node(root).idle_leaves.empty())
      return remove_tree(node(root).idle_leaves.begin()->second, blocks);
  const auto& from = idle_leaves_.empty() ? idle_inner_ : idle_leaves_;
  if (!from.empty()) remove_tree(from.begin()->second, blocks);
}

void PrefixIndex::clear(std::vector<int32_t>& blocks) {
  for (int32_t index = 0; index < static_cast<int32_t>(nodes_.size()); ++index)
    if (node(index).alive && node(index).root == index) remove_tree(index, blocks);
}

void PrefixIndex::check() const {
  int64_t blocks = 0, idle = 0, leaves = 0, inner = 0;
  for (int32_t index = 0; index < static_cast<int32_t>(nodes_.size()); ++index) {
    const Node& n = node(index);
    if (!n.alive) continue;
    for (const int32_t child : n.children)
      MEGATRON_ASSERT(node(child).alive && node(child).parent == index, "a child without parent");
    MEGATRON_ASSERT(
        std::ranges::is_sorted(n.children, {}, [&](int32_t c) { return node(c).tokens; }),
        "children are not in order");
    if (n.block < 0) continue;
    ++blocks;
    MEGATRON_ASSERT(node_of_block_[static_cast<size_t>(n.block)] == index, "a block of two nodes");
    MEGATRON_ASSERT(node(n.parent).alive, "a node without a parent");
    if (!n.idle) continue;
    ++idle;
    (n.children.empty() ? leaves : inner) += 1;
  }
  MEGATRON_ASSERT(blocks == num_blocks_ && idle == num_idle_, "counts of nodes");
  MEGATRON_ASSERT(leaves == static_cast<int64_t>(idle_leaves_.size()) &&
                      inner == static_cast<int64_t>(idle_inner_.size()),
                  "lists of idle nodes");
}

}  // namespace megatron
