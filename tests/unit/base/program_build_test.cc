#include "megatron/base/program_build.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace megatron {
namespace {

TEST(ProgramBuild, IsTheBuildIdOfTheLinker) {
  EXPECT_THAT(program_build(), testing::MatchesRegex("[0-9a-f]{16,64}"));
  EXPECT_EQ(program_build(), program_build());
}

TEST(ProgramBuild, KnowsLibrariesThatAreLoaded) {
  EXPECT_NE(library_build("libc.so"), "");
  EXPECT_NE(library_build("libc.so"), program_build());
  EXPECT_EQ(library_build("libnothing.so"), "");
}

}  // namespace
}  // namespace megatron
