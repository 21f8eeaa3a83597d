// Folders of Hugging Face whose weights are codes with scales: fp8 in blocks, MXFP4.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/stored_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

class HfQuantized : public testing::TestWithParam<std::string> {
 protected:
  HfQuantized() : root_(fs::path(testing::TempDir()) / "hf_quantized") {
    fs::remove_all(root_);
    fs::create_directories(root_);
    at::set_num_threads(1);
  }
  ~HfQuantized() override { fs::remove_all(root_); }

  static fs::path folder() { return hf_golden_folder(GetParam()); }
  static std::map<std::string, at::Tensor> golden() {
    return read_golden_tensors(SafetensorsFile(folder() / "golden.safetensors"));
  }
  // ||actual - expected|| over ||expected|| of the worst row, of both sequences.
  static double difference(const std::function<at::Tensor(const at::Tensor& tokens)>& logits) {
    const auto expected = golden();
    const at::Tensor tokens = expected.at("tokens").to(at::kLong).unsqueeze(0),
                     few = expected.at("logits_short"), many = expected.at("logits_long");
    const auto worst = [](const at::Tensor& actual, const at::Tensor& wanted) {
      return ((actual - wanted).norm(2, -1) / wanted.norm(2, -1)).max().item<double>();
    };
    return std::max(
        worst(logits(tokens.narrow(1, 0, few.size(0))), few),
        worst(logits(tokens).index_select(0, expected.at("positions").to(at::kLong)), many));
  }
  static LoadedModel load(const fs::path& model, const ParallelGroups& groups) {
    LoadModelRequest request;
    request.load = model;
    request.dtype = at::kFloat;
    return load_model(request, groups);
  }
  static double difference_of(const fs::path& model) {
    const at::NoGradGuard no_grad;
    const ParallelGroups groups;
    const LoadedModel loaded = load(model, groups);
    return difference([&](const at::Tensor& tokens) {
      return loaded.model->forward(tokens, context_for(tokens, /*training=*/false))
          .select(1, 0)
          .narrow(1, 0, loaded.config.vocab_size);
    });
  }

  // The folder's files with another tensor or configuration.
  fs::path edited(const std::function<void(Tensors&)>& edit,
                  const std::function<void(ordered_json&)>& edit_config = {}) const {
    const fs::path to = root_ / "edited";
    fs::remove_all(to);
    fs::create_directories(to);
    Tensors tensors = read_stored_tensors(folder() / "model.safetensors");
    if (edit) edit(tensors);
    std::vector<SafetensorsTensor> list;
    for (const auto& [name, stored] : tensors)
      list.push_back({name, stored.dtype, stored.shape, stored.bytes.data()});
    write_safetensors(to / "model.safetensors", list);
    ordered_json config = ordered_json::parse(read_file(folder() / "config.json"));
    if (edit_config) edit_config(config);
    std::ofstream(to / "config.json") << config;
    return to;
  }
  std::string open_error(const fs::path& model) const {
    const std::string text = error_of([&] { open_hf_folder(model); });
    return text.substr(std::min(text.size(), model.string().size()));
  }

  fs::path root_;
};

TEST_P(HfQuantized, GivesTheLogitsOfTransformers) {
  EXPECT_LT(difference_of(folder()), kHfTolerance);
}

// Every rank reads its part of the codes.
TEST_P(HfQuantized, IsReadInParts) {
  std::mutex mutex;
  std::map<int64_t, std::vector<at::Tensor>> parts;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.expert_model_parallel_size = 2;
    config.expert_tensor_parallel_size = 1;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const LoadedModel loaded = load(folder(), groups);
    const at::Tensor all = golden().at("tokens").to(at::kLong).unsqueeze(0);
    for (const int64_t count : {golden().at("logits_short").size(0), all.size(1)}) {
      const at::Tensor tokens = all.narrow(1, 0, count);
      const at::Tensor own =
          loaded.model->forward(tokens, context_for(tokens, /*training=*/false)).select(1, 0);
      const std::lock_guard lock(mutex);
      parts[count].resize(2);
      parts[count][static_cast<size_t>(groups.tp.rank())] = own;
    }
  });
  EXPECT_LT(difference([&](const at::Tensor& tokens) {
              return at::cat(parts.at(tokens.size(1)), 1).narrow(1, 0, 40);
            }),
            kHfTolerance);
}

// Flat ranges of a rank's tensor, as sharded weights are.
TEST_P(HfQuantized, IsReadInFlatRanges) {
  const HfFolder model = open_hf_folder(folder());
  for (const auto& [name, stored] : model.checkpoint.manifest().tensors) {
    if (stored.fragments.front().is_strided() || stored.shape.size() < 2) continue;
    const at::Tensor whole = at::empty(stored.shape, at::kFloat);
    ShardedTensor wanted;
    wanted.key = name;
    wanted.global_shape = stored.shape;
    wanted.data = whole.data_ptr();
    LoadOptions options;
    options.convert_dtype = true;
    options.wanted_elsewhere = {"*"};
    model.checkpoint.load({&wanted, 1}, options);
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1},
                                     {7, whole.numel() / 2},
                                     {whole.numel() / 3, whole.numel()}}) {
      const at::Tensor range = at::empty({end - begin}, at::kFloat);
      wanted.local_shape = stored.shape;
      wanted.flat_begin = begin;
      wanted.flat_end = end;
      wanted.data = range.data_ptr();
      model.checkpoint.load({&wanted, 1}, options);
      EXPECT_TRUE(at::equal(range, whole.flatten().slice(0, begin, end))) << name;
    }
  }
}

TEST_P(HfQuantized, BecomesNumbersAndStaysThem) {
  import_hf_folder(folder(), root_ / "ours");
  EXPECT_LT(difference_of(root_ / "ours"), kHfTolerance);
  export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20});
  EXPECT_LT(difference_of(root_ / "theirs"), kHfTolerance);
  const ordered_json config = ordered_json::parse(read_file(root_ / "theirs" / "config.json"));
  EXPECT_FALSE(config.contains("quantization_config"));
  EXPECT_EQ(config["dtype"], "bfloat16");
  for (const auto& [name, tensor] : read_stored_tensors(root_ / "theirs" / "model.safetensors"))
    EXPECT_EQ(tensor.dtype,
              name.ends_with("e_score_correction_bias") ? DType::kFloat32 : DType::kBFloat16)
        << name;
}

INSTANTIATE_TEST_SUITE_P(Codes, HfQuantized, testing::Values("deepseek_v3_fp8", "gpt_oss_mxfp4"),
                         [](const auto& param) { return param.param; });

class HfFp8 : public HfQuantized {};
INSTANTIATE_TEST_SUITE_P(Codes, HfFp8, testing::Values("deepseek_v3_fp8"));

TEST_P(HfFp8, CodesAndScalesBelongTogether) {
  const std::string down = "model.layers.0.mlp.down_proj.weight",
                    expert = "model.layers.1.mlp.experts.3.up_proj.weight";
  EXPECT_EQ(open_error(edited([&](Tensors& t) { t.erase(expert + "_scale_inv"); })),
            ": " + expert + "_scale_inv is not in the files, which hold " + expert +
                ", codes that it belongs to");
  EXPECT_EQ(open_error(edited([&](Tensors& t) { t.at(down + "_scale_inv").shape = {1, 4}; })),
            ": " + down + "_scale_inv (in model.safetensors) is F32 [1,4], the codes of " + down +
                " need F32 [2,2]");
  EXPECT_EQ(open_error(edited([&](Tensors& t) {
              Stored& scales = t.at(expert + "_scale_inv");
              scales.dtype = DType::kBFloat16;
              scales.bytes.resize(scales.bytes.size() / 2);
            })),
            ": " + expert + "_scale_inv (in model.safetensors) is BF16 [1,2], the codes of " +
                expert + " need F32 [1,2]");
  EXPECT_EQ(open_error(edited([&](Tensors& t) {
              t["model.layers.1.mlp.experts.3.up_proj.weight_scale"] = t.at(expert + "_scale_inv");
            })),
            ": model.layers.1.mlp.experts.3.up_proj.weight_scale is in the files, the model of "
            "config.json has no such tensor");
  EXPECT_NE(open_error(edited([&](Tensors& t) {
              t.at(expert).shape = {48, 72};
            })).find(expert + " has shape [48,72], by config.json it is [24,144]"),
            std::string::npos);
  const fs::path plain =
      edited({}, [](ordered_json& config) { config.erase("quantization_config"); });
  EXPECT_NE(open_error(plain).find(" is stored as F8_E4M3, codes without their scales"),
            std::string::npos);
}

TEST_P(HfFp8, OtherFormsAreNamed) {
  const auto error = [&](const ordered_json& quantization) {
    const fs::path model =
        edited({}, [&](ordered_json& config) { config["quantization_config"] = quantization; });
    const std::string text = error_of([&] { read_hf_config(model); });
    return text.substr((model / "config.json").string().size());
  };
  EXPECT_EQ(error({{"quant_method", "fp8"}, {"weight_block_size", {64, 64}}}),
            ": weights in fp8 with weight_block_size [64,64] are not built, only [128,128]");
  EXPECT_EQ(error({{"quant_method", "fp8"}}),
            ": weights in fp8 with weight_block_size null are not built, only [128,128]");
}

class HfMxfp4 : public HfQuantized {};
INSTANTIATE_TEST_SUITE_P(Codes, HfMxfp4, testing::Values("gpt_oss_mxfp4"));

TEST_P(HfMxfp4, BlocksAndScalesBelongTogether) {
  const std::string down = "model.layers.1.mlp.experts.down_proj";
  EXPECT_EQ(open_error(edited([&](Tensors& t) { t.erase(down + "_scales"); })),
            ": " + down + "_scales is not in the files, which hold " + down +
                "_blocks, codes that it belongs to");
  EXPECT_EQ(open_error(edited([&](Tensors& t) { t.erase(down + "_blocks"); })),
            ": " + down +
                " is not in the files, the model of config.json has it\n"
                "detail: " +
                down + "_scales is in the files, the model of config.json has no such tensor");
  // A missing expert
  EXPECT_EQ(open_error(edited([&](Tensors& t) {
              for (const char* part : {"_blocks", "_scales"}) {
                Stored& stored = t.at(down + part);
                stored.bytes.resize(stored.bytes.size() / 4 * 3);
                stored.shape[0] = 3;
              }
            })),
            ": " + down + " has shape [3,32,32], by config.json it is [4,32,32]");
  EXPECT_EQ(open_error(edited([&](Tensors& t) { t.at(down + "_blocks").shape = {4, 32, 16, 1}; })),
            ": " + down +
                "_blocks (in model.safetensors) has shape [4,32,16,1] of U8, expected 16 bytes of "
                "U8 in every block\n"
                "detail: " +
                down +
                " is not in the files, the model of config.json has it\n"
                "detail: " +
                down +
                "_blocks is in the files, the model of config.json has no such tensor\n"
                "detail: " +
                down + "_scales is in the files, the model of config.json has no such tensor");
}

}  // namespace
}  // namespace megatron
