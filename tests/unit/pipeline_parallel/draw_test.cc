#include "megatron/pipeline_parallel/draw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"

namespace megatron {
namespace {

using testing::HasSubstr;

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    ++n;
  return n;
}

TEST(Draw, TextOfASmallPipeline) {
  const Schedule s = make_schedule(ScheduleKind::k1F1B, shape_of(2, 1, 2));
  EXPECT_EQ(draw_text(s, replay(s), 27),
            "1f1b: 2 stages, 2 micro-batches; idle 33.3%\n"
            "stage 0  |F0 F1 ......B0    ...B1    | holds 2, idle 33.3%\n"
            "stage 1  |...F0 B0    F1 B1    ......| holds 1, idle 33.3%\n");
}

TEST(Draw, TextMarksChunksAndPendingWeights) {
  const Schedule s = make_schedule(ScheduleKind::kZeroBubbleV, shape_of(2, 2, 4));
  const std::string text = draw_text(s, replay(s), 75);
  EXPECT_THAT(text, HasSubstr("zb-v: 2 stages, 2 chunks each, 4 micro-batches; idle 4.0%"));
  EXPECT_THAT(text, HasSubstr("stage 1  |...F0 F0'F1 F1'I0'W0'F2 I0 W0 F2'"));
  EXPECT_THAT(text, HasSubstr("holds 4, 3 for W, idle 4.0%"));
}

TEST(Draw, SvgHasEveryPassAndEveryStage) {
  for (const ScheduleKind kind : kAllKinds) {
    const Schedule s = make_schedule(kind, shape_of(4, 2, 8));
    const std::string svg = draw_svg(s, replay(s));
    size_t actions = 0;
    for (const auto& list : s.stages) actions += list.size();
    EXPECT_EQ(count(svg, "<title>"), actions);
    EXPECT_EQ(count(svg, ">stage "), 4u);
    EXPECT_EQ(count(svg, "<rect"), count(svg, "/>") + count(svg, "</rect>"));
    EXPECT_THAT(svg, HasSubstr("backward, micro-batch 7, chunk 0: "));
    EXPECT_TRUE(svg.ends_with("</svg>\n"));
    // The legend explains what is shown and nothing else.
    EXPECT_EQ(count(svg, ">weight gradient 1</text>"),
              to_string(s.stages[3]).find("W1") != std::string::npos ? 1u : 0u);
  }
}

}  // namespace
}  // namespace megatron
