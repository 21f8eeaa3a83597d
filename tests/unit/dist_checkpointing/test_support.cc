#include "test_support.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"

namespace megatron {

namespace fs = std::filesystem;

ScratchFolder::ScratchFolder() {
  // In memory where that is possible: the tests fsync thousands of times.
  const fs::path base =
      ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
  std::string name = (base / "megatron_checkpoint_XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw Error("cannot make a scratch folder");
  path_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

namespace {

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

template <class T>
void fill(std::vector<T>& out, uint64_t seed, uint64_t key) {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<T>(mix(mix(seed) ^ mix(key) ^ i) >> 40);
}

template <class T>
ShardedTensor whole(const char* key, DType dtype, std::vector<int64_t> shape,
                    std::vector<T>& data) {
  ShardedTensor tensor;
  tensor.key = key;
  tensor.dtype = dtype;
  tensor.global_shape = tensor.local_shape = std::move(shape);
  tensor.data = data.data();
  return tensor;
}

}  // namespace

TinyModel::TinyModel(uint64_t seed, int64_t rows)
    : moments_(static_cast<size_t>(rows * 32)),
      weight_(static_cast<size_t>(rows * 64)),
      bias_(33),
      half_(501),
      step_(1),
      rows_(rows) {
  fill(moments_, seed, 1);
  fill(weight_, seed, 2);
  fill(bias_, seed, 3);
  fill(half_, seed, 4);
  fill(step_, seed, 5);
}

std::vector<ShardedTensor> TinyModel::tensors() {
  return {whole("model.weight", DType::kFloat32, {rows_, 64}, weight_),
          whole("model.bias", DType::kFloat32, {33}, bias_),
          whole("model.half", DType::kBFloat16, {3, 167}, half_),
          whole("optimizer.exp_avg.model.weight", DType::kFloat64, {rows_, 4, 8}, moments_),
          whole("optimizer.step", DType::kInt64, {}, step_)};
}

bool TinyModel::equals(const TinyModel& other) const {
  return moments_ == other.moments_ && weight_ == other.weight_ && bias_ == other.bias_ &&
         half_ == other.half_ && step_ == other.step_;
}

void TinyModel::clear() {
  std::fill(moments_.begin(), moments_.end(), -1.0);
  std::fill(weight_.begin(), weight_.end(), -1.0f);
  std::fill(bias_.begin(), bias_.end(), -1.0f);
  std::fill(half_.begin(), half_.end(), uint16_t{1});
  std::fill(step_.begin(), step_.end(), -1);
}

SaveRequest request_for(TinyModel& model, const fs::path& root, int64_t iteration) {
  SaveRequest request;
  request.root = root;
  request.iteration = iteration;
  request.tensors = model.tensors();
  request.state =
      cat("{\"iteration\": ", iteration, ", \"consumed_samples\": ", iteration * 8, "}");
  request.files = {{"config.yaml", "seed: 1\n"}, {"tokenizer/tokenizer.json", "{}"}};
  return request;
}

bool holds_seed(const fs::path& directory, uint64_t seed, int64_t rows) {
  TinyModel loaded(0, rows);
  loaded.clear();
  Checkpoint(directory).load(loaded.tensors(), {.threads = 1});
  return loaded.equals(TinyModel(seed, rows));
}

void flip_bit(const fs::path& path, uint64_t bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(bit / 8));
  char byte = 0;
  file.get(byte);
  byte = static_cast<char>(byte ^ (1 << (bit % 8)));
  file.seekp(static_cast<std::streamoff>(bit / 8));
  file.put(byte);
  file.flush();
  if (!file) throw Error("cannot flip a bit of " + path.string());
}

std::string slurp(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void spill(const fs::path& path, const std::string& contents) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << contents;
  out.close();
  if (!out) throw Error("cannot write " + path.string());
}

std::vector<fs::path> files_below(const fs::path& directory) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace megatron
