#include "megatron/reporting/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/reporting/svg_chart.h"
#include "megatron/reporting/trace.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::filesystem::path run_folder(const std::string& name, const std::string& lines) {
  const auto folder = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "metrics.jsonl") << lines;
  return folder;
}

// A run that was killed after iteration 3 and resumed from iteration 2.
constexpr const char* kLines =
    R"({"type": "start", "time": 1, "iteration": 0, "device": "cpu", "parameters": 10}
{"type": "train", "time": 2, "iteration": 1, "lm loss": 5.0, "learning_rate": 0.1, "grad_norm": 1.0, "seconds_per_iteration": 2.0, "consumed_tokens": 10}
{"type": "train", "time": 3, "iteration": 2, "lm loss": 4.0, "learning_rate": 0.2, "grad_norm": 1.5, "seconds_per_iteration": 1.0, "consumed_tokens": 20}
{"type": "evaluation", "time": 3, "iteration": 2, "split": "validation", "set": "", "lm loss": 4.5}
{"type": "checkpoint", "time": 3, "iteration": 2, "bytes": 2000000, "seconds": 0.5, "directory": "/r/iter_0000002"}
{"type": "train", "time": 4, "iteration": 3, "lm loss": 99.0}
{"type": "tra
{"type": "start", "time": 5, "iteration": 2, "device": "cpu", "parameters": 10, "note": "<&>"}
{"type": "train", "time": 6, "iteration": 3, "lm loss": 3.0, "learning_rate": 0.3, "grad_norm": null, "seconds_per_iteration": 1.0, "skipped_iterations": 1, "consumed_tokens": 30}
{"type": "evaluation", "time": 7, "iteration": 3, "split": "validation", "set": "", "lm loss": 3.5}
{"type": "evaluation", "time": 7, "iteration": 3, "split": "test", "set": "", "lm loss": 1.0}
{"type": "end", "time": 8, "iteration": 3, "reason": "finished"}
)";

TEST(Report, AResumedRunVoidsWhatItRedoes) {
  const RunHistory run = read_run(run_folder("report_resumed", kLines));
  ASSERT_EQ(run.train.size(), 3u);
  EXPECT_EQ(run.train[2].loss, 3.0);
  EXPECT_TRUE(std::isnan(run.train[2].grad_norm));
  EXPECT_EQ(run.num_starts, 2);
  EXPECT_EQ(run.unreadable_lines, 1);
  EXPECT_EQ(run.end_reason, "finished");
  EXPECT_EQ(run.best_validation()->loss, 3.5);
  EXPECT_EQ(run.training_seconds(), 4.0);
  EXPECT_EQ(run.checkpoints.size(), 1u);
}

TEST(Report, ReadsTheLossOfPreferences) {
  const RunHistory run =
      read_run(run_folder("report_dpo", R"({"type": "start", "time": 1, "iteration": 0}
{"type": "train", "time": 2, "iteration": 1, "dpo loss": 0.5}
{"type": "evaluation", "time": 3, "iteration": 1, "split": "validation", "set": "", "dpo loss": 0.25}
)"));
  EXPECT_EQ(run.train.at(0).loss, 0.5);
  EXPECT_EQ(run.best_validation()->loss, 0.25);
}

TEST(Report, PageHoldsEverythingAndNothingFromOutside) {
  const std::string page =
      render_report({read_run(run_folder("report_page", kLines))}, {"run <1>", true});
  for (const char* text :
       {"run &lt;1&gt;", "&lt;&amp;&gt;", "loss per token (log)", "Learning rate", "Gradient norm",
        "Throughput", "Step time", "iter_0000002", "2.0 MB", "3.5000", "finished",
        "prefers-color-scheme: dark"})
    EXPECT_THAT(page, HasSubstr(text));
  for (const char* text : {"http://", "https://", "<link", "src="})
    EXPECT_THAT(page, testing::Not(HasSubstr(text)));
}

TEST(Report, Json) {
  const auto json = nlohmann::json::parse(report_json(read_run(run_folder("report_json", kLines))));
  EXPECT_EQ(json["iteration"], 3);
  EXPECT_EQ(json["best_validation"]["lm loss"], 3.5);
  EXPECT_EQ(json["evaluations"].size(), 3u);
  EXPECT_EQ(json["run"]["note"], "<&>");
  const auto empty = nlohmann::json::parse(
      report_json(read_run(run_folder("report_empty", R"({"type": "start", "iteration": 0})"))));
  EXPECT_TRUE(empty["train_loss"].is_null());
  EXPECT_TRUE(empty["best_validation"].is_null());
}

TEST(Report, ARunWithoutRecordsStillHasAPage) {
  EXPECT_THAT(
      render_report({read_run(run_folder("report_bare", R"({"type": "start", "iteration": 0})"))},
                    {"x", false}),
      HasSubstr("<svg"));
}

// The evaluation after training reads other samples: it is no point of the curve, and its loss is
// no best one.
TEST(Report, TheEvaluationAtTheEndIsNamed) {
  const char* const old_and_new[] = {"", R"("at_end": true, )"};
  for (const std::string mark : old_and_new) {
    const RunHistory run =
        read_run(run_folder("report_end", R"({"type": "start", "time": 1, "iteration": 0}
{"type": "evaluation", "time": 7, "iteration": 2, "split": "validation", "set": "", "lm loss": 4.5}
{"type": "evaluation", "time": 8, "iteration": 4, "split": "validation", "set": "", "lm loss": 4.0}
{"type": "evaluation", "time": 9, "iteration": 4, "split": "validation", "set": "", )" +
                                              mark + R"("lm loss": 3.0}
)"));
    EXPECT_EQ(run.best_validation()->loss, 4.0);
    EXPECT_FALSE(run.evaluations[1].at_end);
    EXPECT_TRUE(run.evaluations[2].at_end);
    const std::string page = render_report({run}, {"x", false});
    EXPECT_THAT(page, HasSubstr("data-name=\"validation, at the end\" data-points=\"4,3,"));
    EXPECT_THAT(page, HasSubstr("best validation, at 4"));
  }
  const RunHistory only_end =
      read_run(run_folder("report_only_end", R"({"type": "start", "time": 1, "iteration": 0}
{"type": "evaluation", "time": 9, "iteration": 4, "split": "validation", "set": "", "at_end": true, "lm loss": 3.0}
)"));
  EXPECT_EQ(only_end.best_validation()->loss, 3.0);
}

constexpr const char* kTimes =
    R"({"type": "start", "time": 100, "iteration": 0, "versions": {"libtorch": "2.11"}, "hosts": [{"host": "node1", "ranks": "0-7", "gpu": "H100"}, {"host": "node2", "ranks": "8-15", "gpu": "H100"}]}
{"type": "startup", "time": 101, "iteration": 1, "seconds": {"data": 0.25, "model": 0.75}}
{"type": "train", "time": 110, "iteration": 10, "lm loss": 5.0, "seconds_per_iteration": 2.0, "mfu": 0.43, "consumed_tokens": 10}
{"type": "timers", "time": 110, "iteration": 10, "optimizer": 0.25, "forward-backward": 1.0}
{"type": "train", "time": 120, "iteration": 20, "lm loss": 4.0, "seconds_per_iteration": 2.0, "mfu": 0.44, "consumed_tokens": 20}
{"type": "timers", "time": 120, "iteration": 20, "optimizer": 0.75, "forward-backward": 2.0}
{"type": "sections", "time": 110, "iteration": 10, "forward_seconds": 0.5, "forward_max_seconds": 0.75, "forward_max_rank": 3, "communication_seconds": 0.25, "communication_max_seconds": 0.5, "communication_max_rank": 1}
{"type": "sections", "time": 115, "iteration": 15, "forward_seconds": 0.5, "forward_max_seconds": 0.75, "forward_max_rank": 3, "communication_seconds": 0.25, "communication_max_seconds": 0.5, "communication_max_rank": 0}
{"type": "sections", "time": 120, "iteration": 20, "forward_seconds": 0.8, "forward_max_seconds": 0.9, "forward_max_rank": 2, "communication_seconds": 0.1, "communication_max_seconds": 0.2, "communication_max_rank": 0}
{"type": "memory", "time": 120, "iteration": 20, "resident_bytes": 1048576, "allocated_bytes": 2097152, "max_allocated_bytes": 3145728, "reserved_bytes": 4194304}
{"type": "evaluation", "time": 121, "iteration": 20, "split": "validation", "set": "", "lm loss": 4.5, "seconds": 6.0}
{"type": "checkpoint", "time": 122, "iteration": 20, "bytes": 10, "seconds": 4.0, "directory": "/r/iter_0000020"}
{"type": "end", "time": 200, "iteration": 20, "reason": "finished"}
)";

TEST(Report, SaysWhereTheTimeWent) {
  const RunHistory run = read_run(run_folder("report_times", kTimes));
  EXPECT_EQ(run.wall_seconds, 100.0);
  EXPECT_EQ(run.sections, (std::vector<std::pair<std::string, double>>{{"optimizer", 0.5},
                                                                       {"forward-backward", 1.5}}));
  ASSERT_EQ(run.rank_sections.size(), 2u);
  EXPECT_EQ(run.rank_sections[0].name, "forward");
  EXPECT_DOUBLE_EQ(run.rank_sections[0].seconds, 0.6);
  EXPECT_DOUBLE_EQ(run.rank_sections[0].max_seconds, 0.8);
  EXPECT_EQ(run.rank_sections[0].max_rank, 3);
  EXPECT_EQ(run.rank_sections[1].max_rank, 0);
  EXPECT_EQ(run.start_seconds,
            (std::vector<std::pair<std::string, double>>{{"data", 0.25}, {"model", 0.75}}));
  const std::string page = render_report({run}, {"x", false});
  // 40 of 100 seconds in steps, 6 in evaluations, 4 in checkpoints, 50 elsewhere.
  for (const char* text :
       {">0:40</td><td class=\"num\">40.0%", ">0:06</td><td class=\"num\">6.0%",
        ">0:04</td><td class=\"num\">4.0%", "everything else", ">0:50</td><td class=\"num\">50.0%",
        ">500.00 ms</td><td class=\"num\">25.0%", ">750.00 ms</td><td class=\"num\">75.0%", "44.0%",
        "Model FLOP/s utilization", "<b>Memory</b>", "data-points=\"20,4,", "versions: libtorch",
        "<td>forward</td><td class=\"num\">600.00 ms</td><td class=\"num\">75.0%</td>"
        "<td class=\"num\">800.00 ms</td><td class=\"num\">3</td>",
        "node2", "8-15"})
    EXPECT_THAT(page, HasSubstr(text));
}

TEST(Report, ShowsTheLatestTokensPerExpert) {
  const RunHistory run = read_run(run_folder("report_experts",
                                             R"({"type": "start", "time": 100, "iteration": 0}
{"type": "tokens_per_expert", "time": 101, "iteration": 10, "counts": {"decoder.layers.0.mlp.router": [1, 1]}}
{"type": "tokens_per_expert", "time": 102, "iteration": 20, "counts": {"decoder.layers.0.mlp.router": [4, 9, 0, 3], "decoder.layers.1.mlp.router": [4, 4, 4, 4]}}
)"));
  EXPECT_EQ(run.tokens_per_expert_iteration, 20);
  ASSERT_EQ(run.tokens_per_expert.size(), 2u);
  EXPECT_EQ(run.tokens_per_expert[0].tokens, (std::vector<int64_t>{4, 9, 0, 3}));
  const std::string page = render_report({run}, {"x", false});
  EXPECT_THAT(page, HasSubstr("Tokens per expert in iteration 20"));
  EXPECT_THAT(page, HasSubstr("<td>decoder.layers.0.mlp.router</td><td class=\"num\">2.25</td>"
                              "<td class=\"num\">1</td><td class=\"num\">0.00</td>"
                              "<td class=\"num\">1</td>"));
  EXPECT_THAT(report_json(run), HasSubstr("\"decoder.layers.1.mlp.router\": ["));
}

TEST(Report, SeveralRunsAreCompared) {
  const auto first = run_folder("report_a", kTimes), second = run_folder("report_b", kLines);
  std::ofstream(first / "config.yaml") << "# training\nlr: 0.1\nseed: 1\nmock_data: true\n";
  std::ofstream(second / "config.yaml") << "# training\nlr: 0.2\nseed: 1\nextra: \"a: b\"\n";
  const std::vector<RunHistory> runs = {read_run(first), read_run(second / "metrics.jsonl")};
  EXPECT_EQ(runs[1].name, "report_b");
  EXPECT_THAT(differences({&runs[0].config, &runs[1].config}),
              ElementsAre(std::pair("lr", std::vector<std::string>{"0.1", "0.2"}),
                          std::pair("mock_data", std::vector<std::string>{"true", ""}),
                          std::pair("extra", std::vector<std::string>{"", "\"a: b\""})));
  const std::string page = render_report(runs, {"two", false});
  for (const char* text :
       {"data-name=\"report_a\"", "data-name=\"report_b\"", "data-name=\"report_b: validation\"",
        "Differences of the configurations",
        "<td>lr</td><td class=\"num\">0.1</td><td class=\"num\">0.2</td>",
        "Configuration of report_a"})
    EXPECT_THAT(page, HasSubstr(text));
  EXPECT_THAT(
      page,
      testing::Not(HasSubstr("<td>seed</td><td class=\"num\">1</td><td class=\"num\">1</td>")));
}

TEST(Report, Errors) {
  const auto message = [](const std::filesystem::path& folder) -> std::string {
    try {
      read_run(folder);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(message("/nonexistent"), HasSubstr("/nonexistent/metrics.jsonl cannot be read"));
  EXPECT_THAT(message(run_folder("report_none", "hello\n")), HasSubstr("holds no record of a run"));
  EXPECT_THAT(message(run_folder("report_types", R"({"type": "train", "iteration": "x"})")),
              HasSubstr("holds no record of a run"));
}

TEST(SvgChart, TicksAreRound) {
  EXPECT_THAT(round_ticks(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(round_ticks(-0.3, 1.1, 3), ElementsAre(0, 0.5, 1));
  EXPECT_TRUE(round_ticks(1, 1, 5).empty());
}

TEST(SvgChart, NumbersAreShort) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.25), "0.25");
  EXPECT_EQ(short_number(1500), "1.5k");
  EXPECT_EQ(short_number(12.5e6), "12.5M");
  EXPECT_EQ(short_number(3e9), "3G");
  EXPECT_EQ(short_number(3e-4), "0.0003");
}

TEST(SvgChart, ThinningKeepsExtremes) {
  std::vector<std::pair<double, double>> points;
  for (int i = 0; i < 10000; ++i)
    points.emplace_back(i, i == 5003 ? 100.0 : i == 7007 ? -100.0 : std::sin(i));
  const auto thin = thin_out(points, 100);
  EXPECT_LE(thin.size(), 100u);
  EXPECT_THAT(thin, testing::Contains(std::pair(5003.0, 100.0)));
  EXPECT_THAT(thin, testing::Contains(std::pair(7007.0, -100.0)));
  EXPECT_TRUE(
      std::is_sorted(thin.begin(), thin.end(), [](auto a, auto b) { return a.first < b.first; }));
  EXPECT_EQ(thin_out(points, 20000).size(), 10000u);
}

TEST(SvgChart, GapsAndLogarithms) {
  const double nan = std::nan("");
  Chart chart{"t",  "x",  "y", {{"s", {{1, 1}, {2, nan}, {3, 100}, {4, -1}, {5, 10}}, false}},
              true, false};
  const std::string svg = render_chart(chart);
  const size_t begin = svg.find(" d=\"") + 4;
  const std::string path = svg.substr(begin, svg.find('"', begin) - begin);
  EXPECT_EQ(std::count(path.begin(), path.end(), 'M'), 3);
  EXPECT_EQ(std::count(path.begin(), path.end(), 'L'), 0);
  EXPECT_THAT(svg, HasSubstr(">10<"));
}

TEST(Trace, IsReadByPerfetto) {
  Trace trace;
  const auto now = std::chrono::steady_clock::now();
  trace.add("optimizer", now + std::chrono::microseconds(5), now + std::chrono::microseconds(15));
  trace.add("forward", now, now + std::chrono::microseconds(5));
  const auto path = std::filesystem::path(testing::TempDir()) / "trace_test.json";
  trace.write(path);
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["traceEvents"][0]["name"], "optimizer");
  EXPECT_EQ(json["traceEvents"][0]["ts"], 5.0);
  EXPECT_EQ(json["traceEvents"][0]["dur"], 10.0);
  EXPECT_EQ(json["traceEvents"][0]["ph"], "X");
}

}  // namespace
}  // namespace megatron
