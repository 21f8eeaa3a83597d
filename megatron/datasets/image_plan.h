// Which of the ranks that share a micro-batch encodes which of its images, and which data-parallel
// rank reads which samples of a global batch.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/datasets/sample_sounds.h"

namespace megatron {

// What encoding an image or a sound costs a rank, both in one unit: a function of its sizes, the
// same on all ranks. Called from any thread. Without another one patches and frames.
struct MediaCosts {
  std::function<int64_t(const SampleImage&)> image = &SampleImage::patches;
  std::function<int64_t(const SampleSound&)> sound = &SampleSound::rows;
};

// By image the rank: the largest costs come first, equal ones by number, each to the rank with the
// least so far, of equal ones the first. A function of the costs alone, so that all ranks compute
// the same without a message.
std::vector<int> plan_images(std::span<const int64_t> costs, int ranks);

// The samples of rank `rank` of `ranks`, by their numbers in a global batch with these costs, in
// the order in which it reads them: the largest come first, equal ones by number, and are dealt in
// rows of `ranks`, of which the rank with the least so far has the largest, so that all ranks have
// as many, at one time similar ones, and about the same sum. `ranks` divides the number of samples.
std::vector<int64_t> balanced_samples(std::span<const int64_t> costs, int64_t rank, int64_t ranks);

}  // namespace megatron
