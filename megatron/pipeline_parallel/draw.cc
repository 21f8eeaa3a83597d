#include "megatron/pipeline_parallel/draw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <string_view>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

std::string chunk_mark(int chunk) {
  constexpr std::array<std::string_view, 4> kMarks = {"", "'", "\"", "*"};
  return chunk < static_cast<int>(kMarks.size()) ? std::string(kMarks[static_cast<size_t>(chunk)])
                                                 : cat("^", chunk);
}

std::string held(const ReplayedStage& stage, double makespan) {
  return cat("holds ", stage.peak_activations,
             stage.peak_pending_weight > 1 ? cat(", ", stage.peak_pending_weight, " for W") : "",
             ", idle ", format_fixed(100 * stage.bubble(makespan), 1), "%");
}

// -- SVG

constexpr double kRow = 28, kGap = 4, kLeft = 64, kRight = 168, kTop = 34, kFoot = 34;

// By Action::Kind: fill of the first chunk; further chunks are lighter.
struct Colour {
  int r, g, b;
};
constexpr std::array<Colour, 6> kFill = {
    {{66, 118, 197}, {173, 66, 74}, {208, 109, 40}, {74, 148, 95}, {96, 84, 168}, {148, 84, 140}}};
constexpr std::array<std::string_view, 6> kNames = {
    "forward", "backward", "input gradient", "weight gradient", "logits", "loss and its gradients"};

double lightness(int chunk, int num_chunks) {
  return num_chunks > 1 ? 0.55 * chunk / (num_chunks - 1) : 0.0;
}

std::string fill(Action::Kind kind, int chunk, int num_chunks) {
  const Colour& c = kFill[static_cast<size_t>(kind)];
  const double light = lightness(chunk, num_chunks);
  const auto mix = [&](int v) { return static_cast<int>(std::lround(v + (255 - v) * light)); };
  return cat("rgb(", mix(c.r), ",", mix(c.g), ",", mix(c.b), ")");
}

std::string rect(double x, double y, double width, double height, const std::string& fill,
                 const std::string& more = "") {
  return cat("<rect x=\"", format_fixed(x, 2), "\" y=\"", format_fixed(y, 1), "\" width=\"",
             format_fixed(width, 2), "\" height=\"", format_fixed(height, 1), "\" fill=\"", fill,
             "\"", more);
}

std::string text(double x, double y, const std::string& content, const char* anchor,
                 const char* colour, double size = 12) {
  return cat("<text x=\"", format_fixed(x, 1), "\" y=\"", format_fixed(y, 1), "\" text-anchor=\"",
             anchor, "\" fill=\"", colour, "\" font-size=\"", format_fixed(size, 1), "\">", content,
             "</text>\n");
}

std::string row_of(const Schedule& schedule, const Replay& replay, int stage, double y,
                   double scale) {
  const ReplayedStage& row = replay.stages[static_cast<size_t>(stage)];
  std::string out = text(kLeft - 8, y + kRow / 2 + 4, cat("stage ", stage), "end", "currentColor");
  out += rect(kLeft, y, replay.makespan * scale, kRow, "url(#bubble)") + "/>\n";
  for (const ReplayedAction& a : row.actions) {
    const double x = kLeft + a.start * scale, width = (a.end - a.start) * scale;
    const std::string what =
        cat(kNames[static_cast<size_t>(a.action.kind)], ", micro-batch ", a.action.microbatch,
            schedule.num_chunks > 1 ? cat(", chunk ", a.action.chunk) : "", ": ", a.start, " to ",
            a.end);
    out += rect(x, y, width, kRow, fill(a.action.kind, a.action.chunk, schedule.num_chunks),
                " stroke=\"white\" stroke-width=\"0.8\">") +
           "<title>" + what + "</title></rect>\n";
    const std::string number = cat(a.action.microbatch);
    const double size = std::min(12.0, width / (0.62 * static_cast<double>(number.size()) + 0.3));
    const char* const colour =
        lightness(a.action.chunk, schedule.num_chunks) > 0.3 ? "#1b1b1b" : "white";
    if (size >= 6)
      out += text(x + width / 2, y + kRow / 2 + 0.36 * size, number, "middle", colour, size);
  }
  return out + text(kLeft + replay.makespan * scale + 8, y + kRow / 2 + 4,
                    held(row, replay.makespan), "start", "currentColor", 11);
}

std::string legend(const Schedule& schedule, double y) {
  std::string out;
  double x = kLeft;
  const auto entry = [&](const std::string& colour, const std::string& name) {
    out += rect(x, y, 12, 12, colour) + "/>\n" +
           text(x + 17, y + 10, name, "start", "currentColor", 11);
    x += 32 + 6.4 * static_cast<double>(name.size());
  };
  std::set<std::pair<Action::Kind, int>> used;
  for (const auto& actions : schedule.stages)
    for (const Action& a : actions) used.insert({a.kind, a.chunk});
  for (const auto& [kind, chunk] : used) {
    const std::string name(kNames[static_cast<size_t>(kind)]);
    entry(fill(kind, chunk, schedule.num_chunks),
          schedule.num_chunks > 1 ? cat(name, " ", chunk) : name);
  }
  entry("url(#bubble)", "waits");
  return out;
}

}  // namespace

std::string draw_text(const Schedule& schedule, const Replay& replay, int columns) {
  const double scale = replay.makespan > 0 ? columns / replay.makespan : 0;
  const auto column = [&](double time) { return static_cast<size_t>(std::lround(time * scale)); };
  std::string out = cat(schedule.name, ": ", schedule.num_stages, " stages, ",
                        schedule.num_chunks > 1 ? cat(schedule.num_chunks, " chunks each, ") : "",
                        schedule.num_microbatches, " micro-batches; idle ",
                        format_fixed(100 * replay.bubble_fraction, 1), "%\n");
  for (size_t r = 0; r < replay.stages.size(); ++r) {
    std::string line(column(replay.makespan), '.');
    for (const ReplayedAction& a : replay.stages[r].actions) {
      const size_t begin = column(a.start), end = column(a.end);
      std::string label =
          cat(letter(a.action.kind), a.action.microbatch, chunk_mark(a.action.chunk));
      label.resize(end - begin, ' ');
      line.replace(begin, end - begin, label);
    }
    out += cat("stage ", r, r < 10 ? "  " : " ", "|", line, "| ",
               held(replay.stages[r], replay.makespan), "\n");
  }
  return out;
}

std::string draw_svg(const Schedule& schedule, const Replay& replay, double width) {
  const double scale = replay.makespan > 0 ? (width - kLeft - kRight) / replay.makespan : 0;
  const double height = kTop + (kRow + kGap) * schedule.num_stages + kFoot;
  std::string out =
      cat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ", format_fixed(width, 1), " ",
          format_fixed(height, 1),
          "\" font-family=\"system-ui, sans-serif\" role=\"img\" aria-label=\"pipeline schedule ",
          schedule.name, "\">\n",
          "<defs><pattern id=\"bubble\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
          "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#e9e6e1\"/>"
          "<rect width=\"2\" height=\"6\" fill=\"#cfc9c0\"/></pattern></defs>\n");
  out += text(kLeft, 20,
              cat(schedule.name, ": ", schedule.num_stages, " stages, ",
                  schedule.num_chunks > 1 ? cat(schedule.num_chunks, " chunks each, ") : "",
                  schedule.num_microbatches, " micro-batches; idle ",
                  format_fixed(100 * replay.bubble_fraction, 1), "%"),
              "start", "currentColor", 14);
  for (int stage = 0; stage < schedule.num_stages; ++stage)
    out += row_of(schedule, replay, stage, kTop + (kRow + kGap) * stage, scale);
  out += legend(schedule, kTop + (kRow + kGap) * schedule.num_stages + 10);
  return out + "</svg>\n";
}

}  // namespace megatron
