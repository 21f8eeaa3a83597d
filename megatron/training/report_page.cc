// The HTML of `megatron report`: one page, no network, light and dark.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include "megatron/base/format.h"
#include "megatron/training/report.h"
#include "megatron/training/svg_chart.h"

namespace megatron {

namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #ffffff; --ink: #1d2330; --soft: #667085; --rule: #e4e7ec;
  --c0: #2563eb; --c1: #e8590c; --c2: #0f9d6c; --c3: #9333ea; --c4: #d6336c; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1218; --card: #171b23; --ink: #e6e9ef; --soft: #98a2b3; --rule: #2a303c;
  --c0: #6ea8fe; --c1: #ff9f5a; --c2: #4cd5a0; --c3: #c58cff; --c4: #ff8fb3; } }
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
.series-3 { stroke: var(--c3); --c: var(--c3); } .series-4 { stroke: var(--c4); --c: var(--c4); }
i[class^=series] { background: var(--c); } .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.dot { fill: var(--c); stroke: none; } .grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
.tick { fill: var(--soft); font-size: 11px; } .label { fill: var(--soft); font-size: 12px; }
.panel { padding: 4px 16px; overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 7px 16px 7px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 12px; } tr:last-child td { border-bottom: 0; } .num { text-align: right; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 0 16px; align-items: start; }
)";

// Shows the values nearest to the mouse.
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
  if (!std::isfinite(value)) return "-";
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string card(const std::string& value, const std::string& label) {
  return "<div class=\"card\"><b>" + escape_html(value) + "</b><span>" + escape_html(label) + "</span></div>";
}

using Points = std::vector<std::pair<double, double>>;

Points points_of(const RunHistory& run, double TrainPoint::*member) {
  Points out;
  for (const TrainPoint& point : run.train) out.emplace_back(static_cast<double>(point.iteration), point.*member);
  return out;
}

Chart loss_chart(const RunHistory& run, bool log_y) {
  Chart chart{"Loss", "iteration", log_y ? "loss per token (log)" : "loss per token", {}, log_y, false};
  chart.series.push_back({"train", points_of(run, &TrainPoint::loss), false});
  std::map<std::string, Points> sets;
  for (const EvaluationPoint& point : run.evaluations)
    if (point.split == "validation") sets[point.set].emplace_back(static_cast<double>(point.iteration), point.loss);
  for (auto& [name, points] : sets) chart.series.push_back({name.empty() ? "validation" : "validation " + name, points, true});
  return chart;
}

std::string cards(const RunHistory& run) {
  const TrainPoint last = run.train.empty() ? TrainPoint{} : run.train.back();
  std::string out = "<div class=\"cards\">";
  out += card(fixed(last.loss, 4), "train loss at " + format_count(static_cast<uint64_t>(last.iteration)));
  if (const EvaluationPoint* best = run.best_validation()) {
    out += card(fixed(best->loss, 4), "best validation at " + format_count(static_cast<uint64_t>(best->iteration)));
    out += card(fixed(std::exp(std::min(20.0, best->loss)), 2), "best validation perplexity");
  }
  out += card(short_number(static_cast<double>(last.consumed_tokens)), "tokens seen");
  out += card(format_duration(run.training_seconds()), "time in training steps");
  out += card(short_number(last.tokens_per_second), "tokens per second");
  return out + "</div>\n";
}

std::string charts(const RunHistory& run, bool log_loss) {
  std::string out = "<div class=\"charts\">\n" + render_chart(loss_chart(run, log_loss));
  const auto single = [&](const char* title, const char* label, double TrainPoint::*member, bool from_zero) {
    Chart chart{title, "iteration", label, {{label, points_of(run, member), false}}, false, from_zero};
    out += render_chart(chart);
  };
  single("Learning rate", "learning rate", &TrainPoint::learning_rate, true);
  single("Gradient norm", "norm before clipping", &TrainPoint::grad_norm, true);
  single("Throughput", "tokens per second", &TrainPoint::tokens_per_second, true);
  return out + "</div>\n";
}

std::string table(const std::string& title, const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows) {
  if (rows.empty()) return {};
  const auto cell = [](const char* tag, const std::string& text, bool right) {
    return std::string("<") + tag + (right ? " class=\"num\">" : ">") + escape_html(text) + "</" + tag + ">";
  };
  std::string out = "<section><h2>" + escape_html(title) + "</h2><div class=\"panel\"><table>";
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

std::string tables(const RunHistory& run) {
  std::vector<std::vector<std::string>> facts, evaluations, checkpoints;
  for (const auto& [key, value] : run.facts) facts.push_back({key, value});
  facts.push_back({"starts", std::to_string(run.num_starts)});
  facts.push_back({"state", run.end_reason.empty() ? "running, or killed" : run.end_reason});
  int64_t skipped = 0;
  for (const TrainPoint& point : run.train) skipped += point.skipped_iterations;
  facts.push_back({"skipped iterations", std::to_string(skipped)});
  for (const EvaluationPoint& p : run.evaluations)
    evaluations.push_back({p.split + (p.set.empty() ? "" : " " + p.set), format_count(static_cast<uint64_t>(p.iteration)), fixed(p.loss, 4),
                           fixed(std::exp(std::min(20.0, p.loss)), 2)});
  for (const CheckpointPoint& p : run.checkpoints)
    checkpoints.push_back({p.directory.substr(p.directory.find_last_of('/') + 1), format_bytes(static_cast<double>(p.bytes)),
                           fixed(p.seconds, 2) + " s"});
  return "<div class=\"tables\">" + table("Configuration", {}, facts) +
         table("Evaluations", {"set", "iteration", "loss", "perplexity"}, evaluations) +
         table("Checkpoints", {"checkpoint", "size", "time"}, checkpoints) + "</div>\n";
}

}  // namespace

std::string render_report(const RunHistory& run, const ReportOptions& options) {
  const std::string title = escape_html(options.title);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" + title + "</title>\n<style>" +
         std::string(kStyle) + "</style>\n</head>\n<body>\n<h1>Training run</h1>\n<p class=\"sub\">" + title + "</p>\n" + cards(run) +
         charts(run, options.log_loss) + tables(run) + "<script>" + kScript + "</script>\n</body>\n</html>\n";
}

}  // namespace megatron
