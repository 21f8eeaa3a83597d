// Encoders of pictures as CUDA graphs: the rows of prompts beside those without graphs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megatron/inference/images/held_rows.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/inference/image_model.h"

namespace megatron {
namespace {

at::Tensor rows_of(const ImageModel& m, const std::vector<std::string>& files) {
  MultimodalRow row;
  row.caption = "a";
  for (const std::string& file : files) row.media.push_back(image_of(file));
  return m.prompts->start(m.prompts->of_text(row, "text"), 0, "text").rows->held->values.clone();
}

TEST(PictureGraphsGpu, RowsAreThoseWithoutGraphs) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const std::string a = "1_img1.jpg", b = "0_img1.png";
  for (const char* family : {"llava", "internvl", "gemma3", "qwen2_vl"}) {
    const at::Device gpu(at::kCUDA, 0);
    ImageModel plain(family, gpu, at::kBFloat16), graphed(family, gpu, at::kBFloat16);
    graphed.prompts->use_graphs();
    const auto expect_equal = [&](const std::vector<std::string>& files) {
      EXPECT_TRUE(at::equal(rows_of(plain, files), rows_of(graphed, files)))
          << family << ", " << files.size() << " images from " << files.front();
    };
    EXPECT_FALSE(at::equal(rows_of(plain, {a}), rows_of(plain, {b})));
    expect_equal({a});
    expect_equal({b});
    expect_equal({a, b});
    expect_equal({a, a, b, b, a});
    expect_equal({b, a});
    expect_equal({a});
    for (ImageModel* m : {&plain, &graphed})
      for (Parameter* parameter : m->loaded.model->parameters())
        if (parameter->name.starts_with("vision_model")) parameter->value = parameter->value * 1.5;
    graphed.prompts->forget_graphs();
    expect_equal({a});
    expect_equal({a, b});
  }
}

}  // namespace
}  // namespace megatron
