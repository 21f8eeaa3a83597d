// Line charts as inline SVG: axes with round ticks, a legend; a few lines of script in the page
// show the values at the mouse position.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace megatron {

struct ChartSeries {
  std::string name;
  // In ascending order of x; non-finite values leave a gap
  std::vector<std::pair<double, double>> points;
  bool marks = false;  // a dot at each point
};

struct Chart {
  std::string title, x_label, y_label;
  std::vector<ChartSeries> series;
  bool log_y = false;        // log10 scale; non-positive values leave a gap
  bool y_from_zero = false;  // the axis begins at zero
};

// Round values between low and high (both included where they are round): steps of 1, 2 or 5 times
// a power of ten.
std::vector<double> round_ticks(double low, double high, int about);

// "12.5k", "3e-04", "0.25".
std::string short_number(double value);

// Downsamples to at most `count` points: the lowest and the highest of each bucket.
std::vector<std::pair<double, double>> thin_out(
    const std::vector<std::pair<double, double>>& points, size_t count);

// A <figure> with the SVG. Colours come from CSS classes of the page (series-0 to series-7,
// repeating; grid, axis).
std::string render_chart(const Chart& chart);

// Escapes text for HTML.
std::string escape_html(const std::string& text);

}  // namespace megatron
