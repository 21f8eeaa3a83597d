#include "megatron/reporting/svg_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/base/format.h"

namespace megatron {

namespace {

constexpr double kWidth = 640, kHeight = 300;
constexpr double kLeft = 64, kRight = 16, kTop = 12, kBottom = 44;
constexpr size_t kMostPoints = 1200;
constexpr size_t kColours = 8;

std::string coordinate(double value) { return format_text("%.1f", value); }

struct Axis {
  double low = 0, high = 1;
  double begin = 0, end = 1;  // pixels
  bool log = false;
  double at(double value) const {
    const double v = log ? std::log10(value) : value;
    return begin + (v - low) / (high - low) * (end - begin);
  }
};

bool shown(const Chart& chart, double y) { return std::isfinite(y) && (!chart.log_y || y > 0); }

// The range of the values, widened so that lines do not touch the frame and a constant series has a
// nonzero range.
Axis y_axis(const Chart& chart) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const ChartSeries& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      if (!shown(chart, y)) continue;
      const double v = chart.log_y ? std::log10(y) : y;
      low = std::min(low, v);
      high = std::max(high, v);
    }
  }
  if (low > high) low = 0, high = 1;
  if (chart.y_from_zero && !chart.log_y) low = std::min(low, 0.0);
  const double room = high > low ? 0.05 * (high - low) : std::max(0.05 * std::abs(high), 1e-9);
  const bool at_zero = chart.y_from_zero && !chart.log_y && low == 0;
  return {at_zero ? 0 : low - room, high + room, kHeight - kBottom, kTop, chart.log_y};
}

Axis x_axis(const Chart& chart) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const ChartSeries& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  if (low > high) low = 0, high = 1;
  if (low == high) low -= 0.5, high += 0.5;
  return {low, high, kLeft, kWidth - kRight, false};
}

// Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them if there are few; round
// values if those do not suffice.
std::vector<double> log_ticks(const Axis& axis) {
  std::vector<double> out;
  const double decades = axis.high - axis.low;
  for (int e = static_cast<int>(std::floor(axis.low)); e <= axis.high; ++e)
    for (double m : {1.0, 2.0, 5.0})
      if (m == 1.0 || decades < 3)
        if (const double v = m * std::pow(10.0, e);
            std::log10(v) >= axis.low && std::log10(v) <= axis.high)
          out.push_back(v);
  if (out.size() >= 2) return out;
  return round_ticks(std::pow(10.0, axis.low), std::pow(10.0, axis.high), 5);
}

std::string text_at(double x, double y, const std::string& text, const char* anchor,
                    const char* cls = "tick") {
  return "<text class=\"" + std::string(cls) + "\" x=\"" + coordinate(x) + "\" y=\"" +
         coordinate(y) + "\" text-anchor=\"" + anchor + "\">" + escape_html(text) + "</text>";
}

std::string line(double x1, double y1, double x2, double y2, const char* cls) {
  return "<line class=\"" + std::string(cls) + "\" x1=\"" + coordinate(x1) + "\" y1=\"" +
         coordinate(y1) + "\" x2=\"" + coordinate(x2) + "\" y2=\"" + coordinate(y2) + "\"/>";
}

std::string draw_axes(const Chart& chart, const Axis& x, const Axis& y) {
  std::string out;
  for (double v : chart.log_y ? log_ticks(y) : round_ticks(y.low, y.high, 5)) {
    out += line(kLeft, y.at(v), kWidth - kRight, y.at(v), "grid");
    out += text_at(kLeft - 8, y.at(v) + 4, short_number(v), "end");
  }
  for (double v : round_ticks(x.low, x.high, 7)) {
    out += line(x.at(v), kHeight - kBottom, x.at(v), kHeight - kBottom + 4, "axis");
    out += text_at(x.at(v), kHeight - kBottom + 18, short_number(v), "middle");
  }
  out += line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "axis");
  out += text_at((kLeft + kWidth - kRight) / 2, kHeight - 6, chart.x_label, "middle", "label");
  out += "<text class=\"label\" text-anchor=\"middle\" transform=\"translate(14," +
         coordinate((kTop + kHeight - kBottom) / 2) + ") rotate(-90)\">" +
         escape_html(chart.y_label) + "</text>";
  return out;
}

// The polyline of one series, its dots, and its points for the script: "x,y,px,py;...".
std::string draw_series(const Chart& chart, size_t index, const Axis& x, const Axis& y,
                        std::string& values) {
  const ChartSeries& series = chart.series[index];
  const std::string cls = "series-" + std::to_string(index % kColours);
  std::string path, dots;
  bool pen_down = false;
  for (const auto& [px, py] : thin_out(series.points, kMostPoints)) {
    if (!shown(chart, py)) {
      pen_down = false;
      continue;
    }
    const std::string cx = coordinate(x.at(px)), cy = coordinate(y.at(py));
    path += (pen_down ? "L" : "M") + cx + " " + cy;
    pen_down = true;
    if (series.marks)
      dots += "<circle class=\"" + cls + " dot\" cx=\"" + cx + "\" cy=\"" + cy + "\" r=\"3\"/>";
    values += format_text("%.10g", px) + "," + format_text("%.6g", py) + "," + cx + "," + cy + ";";
  }
  return "<path class=\"" + cls + " line\" d=\"" + path + "\"/>" + dots;
}

}  // namespace

std::string escape_html(const std::string& text) {
  constexpr std::string_view kSpecial = "&<>\"'";
  constexpr const char* kEntities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string out;
  for (const char c : text) {
    const size_t at = kSpecial.find(c);
    at == kSpecial.npos ? out += c : out += kEntities[at];
  }
  return out;
}

std::vector<double> round_ticks(double low, double high, int about) {
  std::vector<double> out;
  if (!(high > low) || about < 1) return out;
  const double raw = (high - low) / about;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (double m : {1.0, 2.0, 5.0}) {
    if (m * power >= raw) {
      step = m * power;
      break;
    }
  }
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  for (int64_t i = first; static_cast<double>(i) * step <= high + 1e-9 * step; ++i)
    out.push_back(static_cast<double>(i) * step);
  return out;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size == 0) return "0";
  if (size >= 1e9) return format_text("%.4gG", value / 1e9);
  if (size >= 1e6) return format_text("%.4gM", value / 1e6);
  if (size >= 1e3) return format_text("%.4gk", value / 1e3);
  if (size < 1e-3) return format_text("%.3g", value);
  return format_text("%.4g", value);
}

std::vector<std::pair<double, double>> thin_out(
    const std::vector<std::pair<double, double>>& points, size_t count) {
  if (points.size() <= count || count < 4) return points;
  std::vector<std::pair<double, double>> out;
  const size_t buckets = count / 2;
  for (size_t b = 0; b < buckets; ++b) {
    const size_t begin = b * points.size() / buckets, end = (b + 1) * points.size() / buckets;
    size_t low = begin, high = begin;
    for (size_t i = begin; i < end; ++i) {
      if (points[i].second < points[low].second) low = i;
      if (points[i].second > points[high].second) high = i;
    }
    out.push_back(points[std::min(low, high)]);
    if (low != high) out.push_back(points[std::max(low, high)]);
  }
  return out;
}

std::string render_chart(const Chart& chart) {
  const Axis x = x_axis(chart), y = y_axis(chart);
  std::string lines, legend;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    std::string values;
    lines += "<g class=\"series\" data-name=\"" + escape_html(chart.series[i].name) + "\"";
    const std::string drawing = draw_series(chart, i, x, y, values);
    lines += " data-points=\"" + values + "\">" + drawing + "</g>";
    legend += "<span class=\"key\"><i class=\"series-" + std::to_string(i % kColours) + "\"></i>" +
              escape_html(chart.series[i].name) + "</span>";
  }
  return "<figure class=\"chart\"><figcaption><b>" + escape_html(chart.title) + "</b>" + legend +
         "<output></output></figcaption><svg viewBox=\"0 0 " + coordinate(kWidth) + " " +
         coordinate(kHeight) + "\" role=\"img\" aria-label=\"" + escape_html(chart.title) + "\">" +
         draw_axes(chart, x, y) + lines + "<line class=\"cursor\" y1=\"" + coordinate(kTop) +
         "\" y2=\"" + coordinate(kHeight - kBottom) + "\" visibility=\"hidden\"/></svg></figure>\n";
}

}  // namespace megatron
