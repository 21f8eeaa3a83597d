#include "megatron/training/experts/routing_files.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSamples = "samples", kLayer = "layer_", kUse = "_use_";

fs::path folder_of(const fs::path& folder, int64_t iteration) {
  char name[32];
  std::snprintf(name, sizeof name, "iter_%07lld", static_cast<long long>(iteration));
  return folder / name;
}

std::string name_of(const RoutingTable::Choices& choices) {
  std::string name = cat(kLayer, choices.layer_number);
  if (choices.use > 0) name += cat(kUse, choices.use);
  return name;
}

// {layer, use} of such a name.
std::pair<int64_t, int64_t> parse_name(const std::string& name, const fs::path& path) {
  int64_t layer = 0, use = 0;
  char rest = 0;
  const int found = std::sscanf(name.c_str(), "layer_%ld_use_%ld%c", &layer, &use, &rest);
  MEGATRON_CHECK(found >= 1 && found <= 2 && layer >= 1 && use >= 0, path.string(), ": ", name,
                 " is no tensor of choices of a router");
  return {layer, use};
}

at::Tensor read_tensor(const SafetensorsFile& file, const SafetensorsEntry& entry,
                       at::ScalarType type) {
  const at::Tensor tensor = at::empty(entry.shape, type);
  MEGATRON_CHECK(to_dtype(type) == entry.dtype, file.path().string(), ": ", entry.name, " is ",
                 to_string(entry.dtype), ", expected ", to_string(to_dtype(type)));
  file.read(entry, tensor.mutable_data_ptr());
  return tensor;
}

}  // namespace

void write_routing(const fs::path& path, const RoutingTable& table) {
  const std::vector<RoutingTable::Choices> all = table.choices();
  std::set<int64_t> numbers;
  for (const auto& one : all) numbers.insert(one.samples.begin(), one.samples.end());
  const std::vector<int64_t> samples(numbers.begin(), numbers.end());
  std::vector<at::Tensor> kept;
  std::vector<SafetensorsTensor> tensors = {{std::string(kSamples),
                                             DType::kInt64,
                                             {static_cast<int64_t>(samples.size())},
                                             samples.data()}};
  for (const auto& one : all) {
    std::vector<int64_t> shape = one.experts.sizes().vec(), rows;
    shape[0] = static_cast<int64_t>(samples.size());
    for (const int64_t sample : one.samples)
      rows.push_back(std::lower_bound(samples.begin(), samples.end(), sample) - samples.begin());
    const at::Tensor experts = at::full(shape, -1, at::kShort);
    experts.index_copy_(0, at::tensor(rows, at::kLong), one.experts.to(at::kShort));
    kept.push_back(experts);
    tensors.push_back({name_of(one), DType::kInt16, shape, experts.const_data_ptr()});
  }
  write_safetensors(path, tensors);
}

void read_routing(const fs::path& path, RoutingTable& table) {
  const SafetensorsFile file(path);
  const at::Tensor samples = read_tensor(file, file.entry(kSamples), at::kLong);
  for (const SafetensorsEntry& entry : file.header().tensors) {
    if (entry.name == kSamples) continue;
    const auto [layer, use] = parse_name(entry.name, path);
    const at::Tensor experts = read_tensor(file, entry, at::kShort).to(at::kInt);
    MEGATRON_CHECK(experts.dim() == 3 && experts.size(0) == samples.numel(), path.string(), ": ",
                   entry.name, " is not [samples, positions, experts of a token]");
    for (int64_t i = 0; i < samples.numel(); ++i) {
      const at::Tensor known = experts[i].select(1, 0).ge(0).nonzero().squeeze(1);
      if (known.numel() > 0)
        table.record(layer, {samples.narrow(0, i, 1), known}, experts[i].index_select(0, known),
                     use);
    }
  }
}

const RoutingReplay* RoutingFiles::begin(int64_t iteration) {
  if (record_.empty() && replay_.empty()) return nullptr;
  passes_ = {};
  passes_.only_experts = true;
  if (!record_.empty()) {
    chosen_ = std::make_unique<RoutingTable>();
    passes_.record = chosen_.get();
  }
  if (replay_.empty()) return &passes_;
  const fs::path folder = folder_of(replay_, iteration);
  MEGATRON_CHECK(fs::is_directory(folder), "--moe-routing-replay ", replay_.string(),
                 " has no choices of iteration ", iteration, ": ", folder.string(),
                 " is no folder\nhint: record them with --moe-routing-record");
  imposed_ = std::make_unique<RoutingTable>();
  for (const fs::directory_entry& file : fs::directory_iterator(folder))
    if (file.path().extension() == ".safetensors") read_routing(file.path(), *imposed_);
  passes_.imposed = imposed_.get();
  return &passes_;
}

void RoutingFiles::end(int64_t iteration) {
  if (!chosen_) return;
  const fs::path folder = folder_of(record_, iteration);
  fs::create_directories(folder);
  char name[32];
  std::snprintf(name, sizeof name, "rank_%05d.safetensors", rank_);
  write_routing(folder / name, *chosen_);
  chosen_.reset();
}

}  // namespace megatron
