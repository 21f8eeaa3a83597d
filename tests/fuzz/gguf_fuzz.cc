// Random damage to GGUF files: every input is either refused with an Error, or is a model whose
// weights, tokenizer and chat template can be read. Most useful under ASan and UBSan.
//
// MEGATRON_FUZZ_SECONDS sets how long the target runs (default 2).
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/chat/chat_template.h"
#include "megatron/interop/gguf/gguf_model.h"
#include "megatron/interop/import_weights.h"
#include "tests/unit/gguf_builder.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Random = std::mt19937_64;

// A file in memory.
class MemoryFile {
 public:
  MemoryFile() : fd_(memfd_create("gguf", 0)) {}
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  void write(const std::string& bytes) const {
    ASSERT_EQ(ftruncate(fd_, 0), 0);
    ASSERT_EQ(pwrite(fd_, bytes.data(), bytes.size(), 0), std::ssize(bytes));
  }
  fs::path path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

uint64_t odd_number(Random& random) {
  constexpr std::array<uint64_t, 12> kEdges = {0,
                                               1,
                                               31,
                                               256,
                                               65536,
                                               uint64_t{1} << 31,
                                               (uint64_t{1} << 32) - 1,
                                               uint64_t{1} << 40,
                                               (uint64_t{1} << 63) - 1,
                                               uint64_t{1} << 63,
                                               ~uint64_t{7},
                                               ~uint64_t{0}};
  return random() % 4 == 0 ? random() : kEdges[random() % kEdges.size()] + random() % 3;
}

// One to four edits: flipped bits, numbers at the edges, cut, repeated and moved pieces.
std::string mutated(std::string bytes, Random& random) {
  for (uint64_t edits = 1 + random() % 4; edits > 0 && bytes.size() > 32; --edits) {
    // Mostly where the metadata are.
    const size_t room = random() % 8 == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 1600);
    const size_t at = random() % room, length = 1 + random() % 24;
    switch (random() % 6) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        break;
      case 1: {
        const uint64_t number = odd_number(random);
        std::memcpy(bytes.data() + std::min(at, bytes.size() - 8), &number, 1 << random() % 4);
        break;
      }
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(random() % room, bytes.substr(at, length));
        break;
      case 4:
        bytes.resize(bytes.size() - std::min<size_t>(bytes.size(), random() % 200));
        break;
      default:
        bytes[at] = static_cast<char>(random());
    }
  }
  return bytes;
}

// A small model whose keys are here and there of another value or type, or not there.
std::string built(Random& random) {
  GgufBuilder b;
  const auto odd = [&] { return random() % 24 == 0; };
  const auto number = [&](const std::string& name, uint32_t value) {
    if (odd()) return;
    if (odd())
      b.key(name, odd_number(random));
    else if (odd())
      b.key(name, static_cast<float>(value));
    else if (odd())
      b.key(name, std::vector<uint32_t>(random() % 4, value));
    else
      b.key(name, value + static_cast<uint32_t>(odd()));
  };
  static const std::array<const char*, 6> kNames = {"llama",  "qwen2",   "qwen3",
                                                    "gemma2", "gptneox", "phi3"};
  const std::string name = kNames[random() % kNames.size()];
  b.key("general.architecture", name);
  number(name + ".block_count", 1);
  number(name + ".context_length", 64);
  number(name + ".embedding_length", 8);
  number(name + ".feed_forward_length", 16);
  number(name + ".attention.head_count", 2);
  number(name + ".attention.head_count_kv", 2);
  if (odd()) number(name + ".rope.scaling.factor", 2);
  if (odd()) b.key(name + ".rope.scaling.type", random() % 2 == 0 ? "yarn" : "linear");
  b.key(name + ".attention.layer_norm_rms_epsilon", 1e-5f);
  const bool pieces = random() % 2 == 0;
  b.key("tokenizer.ggml.model", pieces ? "llama" : "gpt2").key("tokenizer.ggml.pre", "llama-bpe");
  std::vector<std::string> tokens = {"<unk>", "<s>", "a",      "b",
                                     "ab",    "ba",  "<0x41>", "\xe2\x96\x81"};
  if (odd())
    tokens[random() % tokens.size()] = std::string(random() % 5, static_cast<char>(random()));
  b.key("tokenizer.ggml.tokens", tokens);
  std::vector<int32_t> types = {2, 3, 1, 1, 1, 4, 6, 1};
  if (odd()) types[random() % types.size()] = static_cast<int32_t>(random() % 9);
  b.key("tokenizer.ggml.token_type", types);
  if (!odd()) b.key("tokenizer.ggml.scores", std::vector<float>{0, 0, -1, -2, -3, -4, 0, -5});
  if (!pieces || odd())
    b.key("tokenizer.ggml.merges", std::vector<std::string>{odd() ? "a" : "a b", "b a"});
  number("tokenizer.ggml.bos_token_id", 1);
  number("tokenizer.ggml.eos_token_id", 1);
  b.key("tokenizer.chat_template", odd() ? "{% for" : "{{ messages[0].content * 3 }}");
  const auto tensor = [&](const char* stem, std::vector<uint64_t> extents) {
    if (odd()) return;
    if (odd()) extents[random() % extents.size()] = odd_number(random) % 4096;
    uint64_t bytes = 4;
    for (const uint64_t extent : extents) bytes *= extent;
    const uint32_t type = odd() ? static_cast<uint32_t>(random() % 42) : 0;
    std::string data(std::min<uint64_t>(bytes, 1 << 20), '\1');
    odd() ? b.tensor(stem, extents, type, data, odd_number(random))
          : b.tensor(stem, extents, type, data);
  };
  tensor("token_embd.weight", {8, 8});
  tensor("output_norm.weight", {8});
  tensor("blk.0.attn_norm.weight", {8});
  tensor("blk.0.ffn_norm.weight", {8});
  for (const char* stem : {"blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight",
                           "blk.0.attn_output.weight"})
    tensor(stem, {8, 8});
  tensor("blk.0.ffn_gate.weight", {8, 16});
  tensor("blk.0.ffn_up.weight", {8, 16});
  tensor("blk.0.ffn_down.weight", {16, 8});
  return random() % 2 == 0 ? b.build() : mutated(b.build(), random);
}

// Reads all that a command would.
void use(const fs::path& path) {
  const GgufModel model = open_gguf(path);
  const Checkpoint& checkpoint = model.folder.checkpoint;
  std::vector<std::byte> memory;
  for (const auto& [key, stored] : checkpoint.manifest().tensors) {
    ShardedTensor tensor;
    tensor.key = key;
    tensor.dtype = DType::kFloat32;
    tensor.global_shape = stored.shape;
    const uint64_t bytes = num_bytes(tensor.dtype, stored.shape);
    if (bytes > uint64_t{64} << 20) continue;
    memory.resize(bytes);
    tensor.data = memory.data();
    LoadOptions options;
    options.convert_dtype = true;
    options.wanted_elsewhere = {"*"};
    options.threads = 1;
    checkpoint.load({&tensor, 1}, options);
  }
  if (model.tokenizer.tokenizer.empty()) return;
  const auto tokenizer = make_tokenizer(model.tokenizer);
  const std::vector<int32_t> ids = tokenizer->encode("ab ba<s>A b");
  tokenizer->decode(ids);
  const ChatTemplate chat =
      load_chat_template(TemplateSource(model.tokenizer.config, model.tokenizer.name), "");
  chat.render({.messages = R"([{"role": "user", "content": "x"}])"});
}

TEST(GgufFuzz, Files) {
  const char* given = std::getenv("MEGATRON_FUZZ_SECONDS");
  const std::chrono::duration<double> budget(given != nullptr ? std::atof(given) : 2.0);
  std::vector<std::string> corpus;
  for (const char* name : {"llama3", "gemma3", "phi3", "gpt2", "gpt_neox", "mixtral", "deepseek_v2",
                           "glm4_moe", "gpt_oss_mxfp4"})
    corpus.push_back(
        read_file(fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/gguf" / cat(name, ".gguf")));
  const MemoryFile file;
  Random seeds(std::random_device{}());
  int64_t accepted = 0, refused = 0;
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < budget) {
    const uint64_t seed = seeds();
    Random random(seed);
    file.write(random() % 3 == 0 ? mutated(corpus[random() % corpus.size()], random)
                                 : built(random));
    try {
      use(file.path());
      ++accepted;
    } catch (const Error& error) {
      ++refused;
      if (seed % 1000 == 0) std::printf("  %.160s\n", error.what());
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << " threw " << error.what();
    }
  }
  std::printf("%lld inputs accepted, %lld refused\n", static_cast<long long>(accepted),
              static_cast<long long>(refused));
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace megatron
