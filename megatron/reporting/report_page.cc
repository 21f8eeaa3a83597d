// The HTML of `megatron report`: one self-contained page, light and dark.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/reporting/report.h"
#include "megatron/reporting/svg_chart.h"

namespace megatron {

namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #ffffff; --ink: #1d2330; --soft: #667085; --rule: #e4e7ec;
  --c0: #2563eb; --c1: #e8590c; --c2: #0f9d6c; --c3: #9333ea; --c4: #d6336c; --c5: #0891b2; --c6: #a16207; --c7: #64748b; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1218; --card: #171b23; --ink: #e6e9ef; --soft: #98a2b3; --rule: #2a303c;
  --c0: #6ea8fe; --c1: #ff9f5a; --c2: #4cd5a0; --c3: #c58cff; --c4: #ff8fb3; --c5: #5fd0e6; --c6: #e0b04c; --c7: #a3b1c6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 32px 24px 64px; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 32px 0 10px; }
.sub { color: var(--soft); margin: 0 0 20px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-bottom: 16px; }
.card, .chart, .panel { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.card { padding: 12px 16px; } .card b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 12px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 16px; }
.chart { margin: 0; padding: 12px 12px 6px; } .chart svg { width: 100%; height: auto; display: block; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; padding: 0 6px 6px; min-height: 30px; }
figcaption output { margin-left: auto; color: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.key { color: var(--soft); font-size: 12px; } .key i { display: inline-block; width: 14px; height: 3px; border-radius: 2px;
  margin-right: 5px; vertical-align: middle; }
.series-0 { stroke: var(--c0); --c: var(--c0); } .series-1 { stroke: var(--c1); --c: var(--c1); } .series-2 { stroke: var(--c2); --c: var(--c2); }
.series-3 { stroke: var(--c3); --c: var(--c3); } .series-4 { stroke: var(--c4); --c: var(--c4); } .series-5 { stroke: var(--c5); --c: var(--c5); }
.series-6 { stroke: var(--c6); --c: var(--c6); } .series-7 { stroke: var(--c7); --c: var(--c7); }
i[class^=series] { background: var(--c); } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.dot { fill: var(--c); stroke: none; } .grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
.tick { fill: var(--soft); font-size: 11px; } .label { fill: var(--soft); font-size: 12px; }
.panel { padding: 4px 16px; overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 7px 16px 7px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 12px; } tr:last-child td { border-bottom: 0; } .num { text-align: right; }
details { margin-top: 32px; } summary { font-size: 15px; font-weight: 600; cursor: pointer; margin-bottom: 10px; }
.bar { display: inline-block; height: 9px; min-width: 1px; border-radius: 2px; background: var(--c0); vertical-align: middle; }
.tables { columns: 3 360px; column-gap: 16px; margin-top: 32px; } .tables section { break-inside: avoid; margin-bottom: 32px; }
.tables h2 { margin-top: 0; } section + .charts { margin-top: 16px; } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0; }
)";

// Shows the values nearest to the mouse position.
constexpr const char* kScript = R"(
for (const figure of document.querySelectorAll('.chart')) {
  const svg = figure.querySelector('svg'), cursor = figure.querySelector('.cursor'), out = figure.querySelector('output');
  const series = [...figure.querySelectorAll('.series')].map(g => ({ name: g.dataset.name,
    points: g.dataset.points.split(';').filter(Boolean).map(p => p.split(',').map(Number)) })).filter(s => s.points.length);
  svg.addEventListener('mousemove', event => {
    const x = (event.clientX - svg.getBoundingClientRect().left) * svg.viewBox.baseVal.width / svg.getBoundingClientRect().width;
    const near = series.map(s => [s.name, s.points.reduce((a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a)]);
    if (!near.length) return;
    cursor.setAttribute('x1', near[0][1][2]); cursor.setAttribute('x2', near[0][1][2]); cursor.setAttribute('visibility', 'visible');
    out.textContent = near.map(([name, p]) => name + ' ' + p[1] + ' at ' + p[0]).join('   ');
  });
  svg.addEventListener('mouseleave', () => { cursor.setAttribute('visibility', 'hidden'); out.textContent = ''; });
}
)";

std::string fixed(double value, int digits) {
  return std::isfinite(value) ? format_fixed(value, digits) : "-";
}

std::string card(const std::string& value, const std::string& label) {
  return "<div class=\"card\"><b>" + escape_html(value) + "</b><span>" + escape_html(label) +
         "</span></div>";
}

using Points = std::vector<std::pair<double, double>>;
using Rows = std::vector<std::vector<std::string>>;
constexpr const char* kCommand = "command";  // this fact is too long for the table
constexpr double kMiB = 1024.0 * 1024.0;

template <class Point>
Points points_of(const std::vector<Point>& from, double Point::* member, double unit = 1) {
  Points out;
  for (const Point& point : from)
    out.emplace_back(static_cast<double>(point.iteration), point.*member / unit);
  return out;
}

bool any_finite(const Points& points) {
  return std::any_of(points.begin(), points.end(),
                     [](const auto& p) { return std::isfinite(p.second); });
}

std::string count_text(int64_t value) { return format_count(static_cast<uint64_t>(value)); }

// The name of an evaluation: "validation books, at the end".
std::string name_of(const EvaluationPoint& point) {
  const bool second = point.at_end && point.split == "validation";
  return point.split + (point.set.empty() ? "" : " " + point.set) + (second ? ", at the end" : "");
}

// Points of validation by name. The one at the end reads other samples and is not part of a curve.
std::map<std::string, Points> validation_points(const RunHistory& run) {
  std::map<std::string, Points> out;
  for (const EvaluationPoint& point : run.evaluations)
    if (point.split == "validation")
      out[name_of(point)].emplace_back(static_cast<double>(point.iteration), point.loss);
  return out;
}

// Only those of evaluations during training, if there are any.
std::map<std::string, Points> curves(std::map<std::string, Points> points) {
  const auto at_end = [](const auto& entry) { return entry.first.ends_with(", at the end"); };
  if (!std::all_of(points.begin(), points.end(), at_end)) std::erase_if(points, at_end);
  return points;
}

Chart loss_chart(const RunHistory& run, bool log_y) {
  Chart chart{"Loss", "iteration", log_y ? "loss per token (log)" : "loss per token",
              {},     log_y,       false};
  chart.series.push_back({"train", points_of(run.train, &TrainPoint::loss), false});
  for (auto& [name, points] : validation_points(run)) chart.series.push_back({name, points, true});
  return chart;
}

std::string cards(const RunHistory& run) {
  const TrainPoint last = run.train.empty() ? TrainPoint{} : run.train.back();
  std::string out = "<div class=\"cards\">";
  out += card(fixed(last.loss, 4), "train loss at " + count_text(last.iteration));
  if (const EvaluationPoint* best = run.best_validation()) {
    out += card(fixed(best->loss, 4), (best->at_end ? "" : "best ") + name_of(*best) + ", at " +
                                          count_text(best->iteration));
    out += card(fixed(std::exp(std::min(20.0, best->loss)), 2), "its perplexity");
  }
  out += card(short_number(static_cast<double>(last.consumed_tokens)), "tokens seen");
  out += card(format_duration(run.training_seconds()), "time in training steps");
  out += card(short_number(last.tokens_per_second), "tokens per second");
  if (std::isfinite(last.mfu) && last.mfu > 0)
    out += card(fixed(100 * last.mfu, 1) + "%", "model FLOP/s utilization");
  return out + "</div>\n";
}

// A chart of one quantity with a series per run; nothing if no run has it.
struct Quantity {
  const char* title;
  const char* label;
  double TrainPoint::* member;
};
constexpr Quantity kQuantities[] = {
    {"Learning rate", "learning rate", &TrainPoint::learning_rate},
    {"Gradient norm", "norm before clipping", &TrainPoint::grad_norm},
    {"Throughput", "tokens per second", &TrainPoint::tokens_per_second},
    {"Step time", "seconds per iteration", &TrainPoint::seconds_per_iteration},
};

std::string quantity_chart(const std::vector<RunHistory>& runs, const Quantity& quantity) {
  Chart chart{quantity.title, "iteration", quantity.label, {}, false, true};
  for (const RunHistory& run : runs)
    chart.series.push_back({runs.size() > 1 ? run.name : quantity.label,
                            points_of(run.train, quantity.member), false});
  return render_chart(chart);
}

std::string utilization_chart(const std::vector<RunHistory>& runs) {
  Chart chart{
      "Model FLOP/s utilization", "iteration", "part of the device's peak", {}, false, true};
  for (const RunHistory& run : runs)
    if (Points points = points_of(run.train, &TrainPoint::mfu); any_finite(points))
      chart.series.push_back({runs.size() > 1 ? run.name : "MFU", std::move(points), false});
  return chart.series.empty() ? "" : render_chart(chart);
}

std::string memory_chart(const RunHistory& run) {
  Chart chart{"Memory", "iteration", "MiB", {}, false, true};
  const auto add = [&](const char* name, double MemoryPoint::* member) {
    if (Points points = points_of(run.memory, member, kMiB); any_finite(points))
      chart.series.push_back({name, std::move(points), true});
  };
  add("reserved", &MemoryPoint::reserved);
  add("max allocated", &MemoryPoint::max_allocated);
  add("allocated", &MemoryPoint::allocated);
  add("resident on the host", &MemoryPoint::resident);
  return chart.series.empty() ? "" : render_chart(chart);
}

std::string charts(const std::vector<RunHistory>& runs, bool log_loss) {
  std::string out = "<div class=\"charts\">\n";
  if (runs.size() == 1) {
    out += render_chart(loss_chart(runs.front(), log_loss));
  } else {
    Chart train{
        "Training loss", "iteration", log_loss ? "loss per token (log)" : "loss per token", {},
        log_loss,        false};
    Chart validation = train;
    validation.title = "Validation loss";
    for (const RunHistory& run : runs) {
      train.series.push_back({run.name, points_of(run.train, &TrainPoint::loss), false});
      for (auto& [name, points] : curves(validation_points(run)))
        validation.series.push_back({run.name + ": " + name, points, true});
    }
    out += render_chart(train);
    if (!validation.series.empty()) out += render_chart(validation);
  }
  for (const Quantity& quantity : kQuantities) out += quantity_chart(runs, quantity);
  out += utilization_chart(runs);
  if (runs.size() == 1) out += memory_chart(runs.front());
  return out + "</div>\n";
}

std::string table(const std::string& title, const std::vector<std::string>& head,
                  const Rows& rows) {
  if (rows.empty()) return {};
  const auto cell = [](const char* tag, const std::string& text, bool right) {
    return std::string("<") + tag + (right ? " class=\"num\">" : ">") + escape_html(text) + "</" +
           tag + ">";
  };
  std::string out = title.empty() ? "<section>" : "<section><h2>" + escape_html(title) + "</h2>";
  out += "<div class=\"panel\"><table>";
  if (!head.empty()) {
    out += "<tr>";
    for (size_t i = 0; i < head.size(); ++i) out += cell("th", head[i], i > 0);
    out += "</tr>";
  }
  for (const auto& row : rows) {
    out += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) out += cell("td", row[i], i > 0);
    out += "</tr>";
  }
  return out + "</table></div></section>\n";
}

// A table of seconds by name, with bars and shares of `whole`.
std::string time_table(const std::string& title,
                       const std::vector<std::pair<std::string, double>>& parts, double whole,
                       const char* format_as) {
  if (parts.empty() || !(whole > 0)) return {};
  std::string out = "<section><h2>" + escape_html(title) + "</h2><div class=\"panel\"><table>";
  for (const auto& [name, seconds] : parts) {
    const double share = std::clamp(seconds / whole, 0.0, 1.0);
    const std::string value =
        format_as[0] == 'm' ? fixed(1000 * seconds, 2) + " ms" : format_duration(seconds);
    out += "<tr><td>" + escape_html(name) +
           "</td><td><i class=\"bar\" style=\"width:" + fixed(80 * share, 0) +
           "px\"></i></td><td class=\"num\">" + value + "</td><td class=\"num\">" +
           fixed(100 * share, 1) + "%</td></tr>";
  }
  return out + "</table></div></section>\n";
}

// How the time from each start to its last record was used.
std::string where_time_went(const RunHistory& run) {
  std::vector<std::pair<std::string, double>> parts = {{"training steps", run.training_seconds()}};
  double known = run.training_seconds(), evaluations = 0, checkpoints = 0;
  for (const EvaluationPoint& p : run.evaluations)
    evaluations += std::isfinite(p.seconds) ? p.seconds : 0;
  for (const CheckpointPoint& p : run.checkpoints)
    checkpoints += std::isfinite(p.seconds) ? p.seconds : 0;
  if (evaluations > 0) parts.emplace_back("evaluations", evaluations);
  if (checkpoints > 0) parts.emplace_back("checkpoints", checkpoints);
  known += evaluations + checkpoints;
  if (run.wall_seconds > known) parts.emplace_back("everything else", run.wall_seconds - known);
  return time_table("Where the time went", parts, std::max(known, run.wall_seconds), "duration");
}

std::string start_table(const RunHistory& run) {
  double whole = 0;
  for (const auto& [stage, seconds] : run.start_seconds) whole += seconds;
  return time_table("The latest start, by stage", run.start_seconds, whole, "ms");
}

std::string sections_table(const RunHistory& run) {
  const double steps = static_cast<double>(run.train.empty() ? 0 : run.train.back().iteration);
  const double iteration = steps > 0 ? run.training_seconds() / steps : 0;
  return time_table("Timers of an iteration", run.sections, iteration, "ms");
}

std::string rank_sections_table(const RunHistory& run) {
  double whole = 0;
  for (const RankSection& section : run.rank_sections) whole += section.seconds;
  if (!(whole > 0)) return {};
  Rows rows;
  for (const RankSection& section : run.rank_sections)
    rows.push_back({section.name, fixed(1000 * section.seconds, 2) + " ms",
                    fixed(100 * section.seconds / whole, 1) + "%",
                    fixed(1000 * section.max_seconds, 2) + " ms", cat(section.max_rank)});
  return table("An iteration of the ranks",
               {"section", "mean", "share", "longest", "most often by rank"}, rows);
}

std::string tokens_per_expert_table(const RunHistory& run) {
  if (run.tokens_per_expert.empty()) return {};
  Rows rows;
  for (const ExpertTokens& one : run.tokens_per_expert) {
    double sum = 0;
    for (const int64_t tokens : one.tokens) sum += static_cast<double>(tokens);
    const auto [least, most] = std::minmax_element(one.tokens.begin(), one.tokens.end());
    const double mean = sum / static_cast<double>(one.tokens.size());
    const auto over_mean = [&](int64_t tokens) {
      return mean > 0 ? fixed(static_cast<double>(tokens) / mean, 2) : std::string("-");
    };
    rows.push_back({one.router, over_mean(*most), cat(most - one.tokens.begin()), over_mean(*least),
                    cat(std::count(one.tokens.begin(), one.tokens.end(), 0))});
  }
  return table("Tokens per expert in iteration " + count_text(run.tokens_per_expert_iteration),
               {"router", "most over mean", "by expert", "least over mean", "experts without"},
               rows);
}

std::string host_table(const RunHistory& run) {
  if (run.hosts.empty()) return {};
  std::vector<std::string> head;
  Rows rows;
  for (const auto& [name, unused] : run.hosts.front()) head.push_back(name);
  for (const Texts& host : run.hosts) {
    rows.emplace_back();
    for (const auto& [unused, value] : host) rows.back().push_back(value);
  }
  return table("Hosts", head, rows);
}

std::string details(const std::string& title, const Texts& texts) {
  if (texts.empty()) return {};
  Rows rows;
  for (const auto& [name, value] : texts) rows.push_back({name, value});
  return "<details><summary>" + escape_html(title) + "</summary>" + table("", {}, rows) +
         "</details>\n";
}

std::string command_line(const RunHistory& run) {
  for (const auto& [key, value] : run.facts)
    if (key == kCommand)
      return "<section><h2>Command</h2><div class=\"panel\"><pre>" + escape_html(value) +
             "</pre></div></section>\n";
  return {};
}

int64_t skipped_iterations(const RunHistory& run) {
  int64_t skipped = 0;
  for (const TrainPoint& point : run.train) skipped += point.skipped_iterations;
  return skipped;
}

std::string state_of(const RunHistory& run) {
  return run.end_reason.empty() ? "running, or killed" : run.end_reason;
}

std::string tables(const RunHistory& run) {
  Rows facts, evaluations, checkpoints;
  for (const auto& [key, value] : run.facts)
    if (key != kCommand) facts.push_back({key, value});
  facts.push_back({"starts", std::to_string(run.num_starts)});
  facts.push_back({"state", state_of(run)});
  facts.push_back({"skipped iterations", std::to_string(skipped_iterations(run))});
  for (const EvaluationPoint& p : run.evaluations)
    evaluations.push_back({name_of(p), count_text(p.iteration), fixed(p.loss, 4),
                           fixed(std::exp(std::min(20.0, p.loss)), 2)});
  for (const CheckpointPoint& p : run.checkpoints)
    checkpoints.push_back({p.directory.substr(p.directory.find_last_of('/') + 1),
                           format_bytes(static_cast<double>(p.bytes)), fixed(p.seconds, 2) + " s"});
  return "<div class=\"tables\">" + table("Run", {}, facts) + where_time_went(run) +
         rank_sections_table(run) + sections_table(run) + start_table(run) +
         tokens_per_expert_table(run) +
         table("Evaluations", {"set", "iteration", "loss", "perplexity"}, evaluations) +
         table("Checkpoints", {"checkpoint", "size", "time"}, checkpoints) + "</div>\n" +
         host_table(run) + command_line(run) + details("Configuration", run.config);
}

// A table with a row per run.
std::string run_table(const std::vector<RunHistory>& runs) {
  Rows rows;
  for (const RunHistory& run : runs) {
    const TrainPoint last = run.train.empty() ? TrainPoint{} : run.train.back();
    const EvaluationPoint* best = run.best_validation();
    rows.push_back({run.name, count_text(last.iteration), fixed(last.loss, 4),
                    best != nullptr ? fixed(best->loss, 4) : "-",
                    best != nullptr ? count_text(best->iteration) : "-",
                    short_number(static_cast<double>(last.consumed_tokens)),
                    format_duration(run.training_seconds()), short_number(last.tokens_per_second),
                    state_of(run)});
  }
  return table("Runs",
               {"run", "iteration", "train loss", "best validation", "at", "tokens",
                "time in steps", "tokens/s", "state"},
               rows);
}

std::string difference_table(const std::string& title, const std::vector<RunHistory>& runs,
                             const std::vector<Texts>& of) {
  std::vector<const Texts*> texts;
  std::vector<std::string> head = {""};
  for (size_t i = 0; i < runs.size(); ++i) {
    texts.push_back(&of[i]);
    head.push_back(runs[i].name);
  }
  Rows rows;
  for (auto& [name, values] : differences(texts)) {
    rows.push_back({name});
    for (std::string& value : values) rows.back().push_back(value.empty() ? "-" : std::move(value));
  }
  return table(title, head, rows);
}

std::string body(const std::vector<RunHistory>& runs, const ReportOptions& options) {
  if (runs.size() == 1)
    return cards(runs.front()) + charts(runs, options.log_loss) + tables(runs.front());
  std::vector<Texts> configs, facts;
  for (const RunHistory& run : runs) {
    configs.push_back(run.config);
    facts.push_back(run.facts);
    std::erase_if(facts.back(), [&](const auto& fact) {  // facts that are also in the configuration
      const auto same = [&](const auto& entry) { return entry.first == fact.first; };
      return fact.first == kCommand || std::any_of(run.config.begin(), run.config.end(), same);
    });
  }
  std::string out = run_table(runs) + charts(runs, options.log_loss) +
                    difference_table("Differences of the configurations", runs, configs) +
                    difference_table("Other differences", runs, facts);
  for (const RunHistory& run : runs) out += details("Configuration of " + run.name, run.config);
  return out;
}

}  // namespace

std::string render_report(const std::vector<RunHistory>& runs, const ReportOptions& options) {
  const std::string title = escape_html(options.title);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         title + "</title>\n<style>" + std::string(kStyle) + "</style>\n</head>\n<body>\n<h1>" +
         (runs.size() > 1 ? "Training runs" : "Training run") + "</h1>\n<p class=\"sub\">" + title +
         "</p>\n" + body(runs, options) + "<script>" + kScript + "</script>\n</body>\n</html>\n";
}

}  // namespace megatron
