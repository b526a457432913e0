#include "workflow/report/render.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/html.h"
#include "base/json.h"

namespace tare::workflow {

std::string HtmlText(std::string_view text) { return HtmlEscape(Printable(text)); }

std::string NumberText(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e9) {
    std::string digits = fmt::format("{:.0f}", std::abs(value));
    for (size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
    return (value < 0 ? "-" : "") + digits;
  }
  return fmt::format("{:.4g}", value);
}

std::string BoxText(const ScopeBox& box) {
  std::string text =
      fmt::format("shape {}; topology {}; dtype {}; model {}; path {}", fmt::join(box.shape, " | "),
                  fmt::join(box.topology, " | "), fmt::join(box.dtype, " | "),
                  fmt::join(box.model, " | "), fmt::join(box.path, " | "));
  if (!box.contracts.empty())
    text += fmt::format("; contracts {}", fmt::join(box.contracts, " | "));
  return text;
}

std::span<const std::string_view> ReportLimits() {
  static constexpr std::array<std::string_view, 5> kLimits = {
      "A pass holds for the points that its scope lists and for nothing beside them.",
      "Forward, backward, quality and performance are accepted apart; none stands in for another.",
      "Bits are compared between the runs named here; outputs of earlier versions are not promised "
      "to stay the same.",
      "Two updates with equal bits are what this workflow asks at delivery. They are no statement "
      "about other RL systems, and no statement that equal bits are enough for a good policy.",
      "The log shows what was recorded. Without a checkpoint kept elsewhere it does not show that "
      "nothing was cut off its end.",
  };
  return kLimits;
}

namespace {

// Round steps of an axis: 1, 2 or 5 times a power of ten.
std::vector<double> Ticks(double low, double high, int wanted) {
  const double raw = (high - low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double m : {1.0, 2.0, 5.0}) {
    if (m * power >= raw) {
      step = m * power;
      break;
    }
  }
  std::vector<double> ticks;
  const double first = std::ceil(low / step);
  for (int i = 0; (first + i) * step <= high + step * 1e-9; ++i) {
    ticks.push_back((first + i) * step + 0.0);  // no -0
  }
  return ticks;
}

}  // namespace

std::string PlotSvg(const Plot& plot) {
  constexpr double kWidth = 640, kHeight = 260, kLeft = 76, kRight = 16, kTop = 14, kBottom = 44;
  double x0 = INFINITY, x1 = -INFINITY, y0 = 0, y1 = -INFINITY;
  for (const PlotSeries& s : plot.series) {
    for (const auto& [x, y] : s.points) {
      x0 = std::min(x0, x);
      x1 = std::max(x1, x);
      y0 = std::min(y0, y);
      y1 = std::max(y1, y);
    }
  }
  if (x1 <= x0) x1 = x0 + 1;
  const bool flat_zero = y1 <= y0;  // all zero: the line itself is the message
  if (flat_zero) y1 = y0 + 1;
  const auto px = [&](double x) {
    return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight);
  };
  const auto py = [&](double y) {
    return kHeight - kBottom - (y - y0) / (y1 - y0) * (kHeight - kTop - kBottom);
  };
  std::string svg =
      fmt::format("<svg role=img aria-label=\"{}\" viewBox=\"0 0 {:.0f} {:.0f}\" class=plot>",
                  HtmlText(plot.title), kWidth, kHeight);
  for (const double t : Ticks(y0, y1, 4)) {
    svg += fmt::format(
        "<line class=grid x1={:.1f} y1={:.1f} x2={:.1f} y2={:.1f} /><text x={:.1f} y={:.1f} "
        "text-anchor=end>{}</text>",
        kLeft, py(t), kWidth - kRight, py(t), kLeft - 8, py(t) + 4, NumberText(t));
  }
  for (const double t : Ticks(x0, x1, 8)) {
    svg += fmt::format("<text x={:.1f} y={:.1f} text-anchor=middle>{}</text>", px(t),
                       kHeight - kBottom + 16, NumberText(t));
  }
  svg += fmt::format("<text x={:.1f} y={:.1f} text-anchor=middle>{}</text>", (kLeft + kWidth) / 2,
                     kHeight - 8, HtmlText(plot.x_label));
  svg += fmt::format(
      "<text transform=\"translate(13 {:.1f}) rotate(-90)\" text-anchor=middle>{}</text>",
      (kHeight - kBottom + kTop) / 2, HtmlText(plot.y_label));
  std::string legend;
  for (size_t i = 0; i < plot.series.size(); ++i) {
    const PlotSeries& s = plot.series[i];
    std::string path;
    std::string dots;
    for (const auto& [x, y] : s.points) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(x), py(y));
      dots += fmt::format("<circle cx={:.1f} cy={:.1f} r=3><title>{}: {}, {}</title></circle>",
                          px(x), py(y), HtmlText(s.name), NumberText(x), NumberText(y));
    }
    svg += fmt::format("<g class=s{}><path d=\"{}\" />{}</g>", i % 6, path, dots);
    legend += fmt::format("<span class=\"key s{}\">{}</span> ", i % 6, HtmlText(s.name));
  }
  svg += "</svg>";
  std::string table = "<details><summary>numbers</summary><table><tr><th>series<th class=n>" +
                      HtmlText(plot.x_label) + "<th class=n>" + HtmlText(plot.y_label);
  for (const PlotSeries& s : plot.series) {
    for (const auto& [x, y] : s.points) {
      table += fmt::format("<tr><td>{}<td class=n>{}<td class=n>{}", HtmlText(s.name),
                           NumberText(x), NumberText(y));
    }
  }
  return svg + "<p class=legend>" + legend + "</p>" + table + "</table></details>";
}

}  // namespace tare::workflow
