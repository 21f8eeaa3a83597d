// The choices of routers in files, by iteration (--moe-routing-record, --moe-routing-replay): what
// one run chose is imposed on another one, on any number of ranks that read the same samples.
//
//   DIR/iter_0000007/rank_00003.safetensors
//     samples                  [n] int64, their numbers in the order of consumption, ascending
//     layer_5, layer_5_use_1   [n, positions, k] int16: experts; -1: not of this rank. Layers count
//                              from 1, those of multi-token prediction after the decoder's; uses of
//                              a repeated layer from 0, which is left out
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "megatron/transformer/moe/routing_replay.h"

namespace megatron {

// Writes the choices of a table, and adds those of a file to one.
void write_routing(const std::filesystem::path& path, const RoutingTable& table);
void read_routing(const std::filesystem::path& path, RoutingTable& table);

// Those of one rank.
class RoutingFiles {
 public:
  // Folders; empty: nothing is written, or nothing is imposed.
  RoutingFiles(std::filesystem::path record, std::filesystem::path replay, int rank)
      : record_(std::move(record)), replay_(std::move(replay)), rank_(rank) {}

  // What the passes of an iteration do; null: nothing. Throws Error if its choices are not there.
  const RoutingReplay* begin(int64_t iteration);
  // Writes what they chose.
  void end(int64_t iteration);

 private:
  const std::filesystem::path record_, replay_;
  const int rank_;
  std::unique_ptr<RoutingTable> chosen_, imposed_;
  RoutingReplay passes_;
};

}  // namespace megatron
