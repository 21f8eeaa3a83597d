#include "megatron/comm/rank_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using testing::HasSubstr;

TEST(RankSettings, ComeBackAsTheyWere) {
  const RankSettings settings = {
      {"--lr", "0.1"}, {"--load", ""}, {"--data-path", "a b\n12 3"}, {"", "x"}};
  const RankSettings back = unpack_settings(pack_settings(settings));
  ASSERT_EQ(back.size(), settings.size());
  for (size_t i = 0; i < back.size(); ++i) {
    EXPECT_EQ(back[i].name, settings[i].name);
    EXPECT_EQ(back[i].value, settings[i].value);
  }
  for (const char* garbled :
       {"4", "4 3 --l", "x", "99999999999999999999 1 a", "18446744073709551615 2 a"})
    EXPECT_THROW(unpack_settings(garbled), Error) << garbled;
}

TEST(RankSettings, DigestsTellThemApart) {
  EXPECT_EQ(digest({{"a", "1"}}), digest({{"a", "1"}}));
  EXPECT_NE(digest({{"a", "1"}}), digest({{"a", "2"}}));
  EXPECT_NE(digest({{"ab", "1"}}), digest({{"a", "b1"}}));
  EXPECT_EQ(digest({}).size(), 32u);
}

TEST(RankSettings, ListsRanksAsRanges) {
  EXPECT_EQ(rank_list({3}), "rank 3");
  EXPECT_EQ(rank_list({0, 1}), "ranks 0, 1");
  EXPECT_EQ(rank_list({0, 2, 3, 4, 5, 9}), "ranks 0, 2-5, 9");
  std::vector<int> odd;
  for (int rank = 1; rank < 100; rank += 2) odd.push_back(rank);
  EXPECT_EQ(rank_list(odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23 and 38 more");
}

TEST(RankSettings, DifferencesNameSettingValuesAndRanks) {
  EXPECT_EQ(describe_differences({{{0}, {{"--lr", "1"}}}, {{1}, {{"--lr", "1"}}}}), "");
  EXPECT_EQ(describe_differences({{{0}, {{"--seed", "1"}, {"--lr", "0.1"}, {"--save", ""}}},
                                  {{1, 2, 4}, {{"--seed", "1"}, {"--lr", "0.2"}, {"--save", ""}}},
                                  {{3}, {{"--seed", "1"}, {"--lr", "0.2"}, {"--save", "x"}}}}),
            "the ranks do not agree: --lr is 0.2 on ranks 1-4 and 0.1 on rank 0\n"
            "detail: --save is not given on ranks 0-2, 4 and x on rank 3\n"
            "hint: start every rank with the same flags, input files and program");
  RankSettings one, other = {{"--other", "1"}};
  for (int i = 0; i < 20; ++i) {
    one.push_back({cat("--flag-", i), "1"});
    other.push_back({cat("--flag-", i), "2"});
  }
  const std::string many = describe_differences({{{0}, one}, {{1}, other}});
  EXPECT_THAT(many, HasSubstr("--flag-7 is 1 on rank 0 and 2 on rank 1\ndetail: they differ in 13 "
                              "more settings\nhint:"));
}

}  // namespace
}  // namespace megatron
