// Line charts as inline SVG: axes with round ticks, a legend, values under the mouse by a few lines
// of script in the page.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace megatron {

struct ChartSeries {
  std::string name;
  // By ascending x; values that are not finite leave a gap
  std::vector<std::pair<double, double>> points;
  bool marks = false;  // a dot at each point
};

struct Chart {
  std::string title, x_label, y_label;
  std::vector<ChartSeries> series;
  bool log_y = false;        // decimal logarithm; values that are not positive leave a gap
  bool y_from_zero = false;  // the axis begins at zero
};

// Round values between low and high (both included where they are round): steps of 1, 2 or 5 times
// a power of ten.
std::vector<double> round_ticks(double low, double high, int about);

// "12.5k", "3e-04", "0.25".
std::string short_number(double value);

// At most `count` points that show the same extremes: the lowest and the highest of each bucket.
std::vector<std::pair<double, double>> thin_out(
    const std::vector<std::pair<double, double>>& points, size_t count);

// A <figure> with the SVG. Colours are classes of the page (series-0 to series-7, again from the
// first; grid, axis).
std::string render_chart(const Chart& chart);

// Text for HTML.
std::string escape_html(const std::string& text);

}  // namespace megatron
