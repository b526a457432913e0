#include "rl/curves.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/html.h"

namespace tare::rl {
namespace {

double Seconds(const Json& from, const Json& to) {
  return (to.get<double>() - from.get<double>()) * 1e-9;
}

// One line of a panel: points (x, y).
struct Line {
  std::string name;
  size_t run = 0;
  std::vector<std::pair<double, double>> points;
};

std::string Number(double v) {
  const double size = std::fabs(v);
  if (size != 0 && (size < 1e-3 || size >= 1e5)) return fmt::format("{:.1e}", v);
  return fmt::format("{:.3g}", v);
}

// A panel at (x, y) with its axes' ends as numbers.
std::string Panel(double x, double y, double width, double height, const std::string& title,
                  const std::vector<Line>& lines) {
  double low = 1e300, high = -1e300, right = 1;
  for (const Line& line : lines) {
    for (const auto& [px, py] : line.points) {
      low = std::min(low, py), high = std::max(high, py), right = std::max(right, px);
    }
  }
  if (low > high) low = 0, high = 1;
  if (high - low < 1e-12) low -= 0.5, high += 0.5;
  const double left = x + 52, bottom = y + height - 22, top = y + 22, span = width - 62;
  std::string svg = fmt::format(
      "<text class=t x=\"{:.0f}\" y=\"{:.0f}\">{}</text><path class=a d=\"M{:.1f} "
      "{:.1f}V{:.1f}H{:.1f}\"/>"
      "<text class=n text-anchor=end x=\"{:.0f}\" y=\"{:.0f}\">{}</text>"
      "<text class=n text-anchor=end x=\"{:.0f}\" y=\"{:.0f}\">{}</text>"
      "<text class=n text-anchor=end x=\"{:.0f}\" y=\"{:.0f}\">{}</text>",
      x, y + 12, HtmlEscape(title), left, top, bottom, left + span, left - 4, top + 4, Number(high),
      left - 4, bottom, Number(low), left + span, bottom + 14, Number(right));
  for (const Line& line : lines) {
    std::string d;
    for (const auto& [px, py] : line.points) {
      d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", left + px / right * span,
                       bottom - (py - low) / (high - low) * (bottom - top));
    }
    svg += fmt::format("<path class=\"l c{}\" d=\"{}\"><title>{}</title></path>", line.run % 6, d,
                       HtmlEscape(line.name));
  }
  return svg;
}

}  // namespace

Result<Curves> CurvesOf(const std::string& name, const Json& receipt) {
  Curves c;
  c.name = name;
  try {
    const Json& rounds = receipt.at("rounds");
    const Json& updates = receipt.at("updates");
    for (size_t i = 0; i < updates.size() && i < rounds.size(); ++i) {
      const Json& u = updates[i];
      const Json& r = rounds[i];
      Curves::Step s;
      s.reward = r.at("reward").at("mean").get<double>();
      s.loss = u.at("loss").get<double>();
      s.gradient_norm = u.at("gradient_norm").get<double>();
      s.ratio_min = u.at("ratio_min").get<double>();
      s.ratio_max = u.at("ratio_max").get<double>();
      s.lr = u.at("lr").get<double>();
      s.rollout = Seconds(r.at("rollout").at("started_ns"), r.at("rollout").at("ended_ns"));
      const Json& score = r.at("paths").at("score");
      s.compare = Seconds(score.at("started_ns"), score.at("ended_ns"));
      s.forward_backward = u.at("forward_backward_ns").get<double>() * 1e-9;
      s.optimizer = u.at("optimizer_ns").get<double>() * 1e-9;
      s.publish = (u.at("publish").at("write_ns").get<double>() +
                   u.at("publish").at("update_ns").get<double>()) *
                  1e-9;
      c.steps.push_back(s);
    }
    for (const Json& r : rounds) {
      if (r.contains("held_out")) {
        c.held_out.emplace_back(r.at("version").get<int64_t>(),
                                r.at("held_out").at("mean").get<double>());
      }
    }
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("receipt of {}: {}", name, e.what());
  }
  return c;
}

Json ToJson(const Curves& c) {
  Json steps = Json::array(), held = Json::array();
  for (const Curves::Step& s : c.steps) {
    steps.push_back(Json{{"reward", s.reward},
                         {"loss", s.loss},
                         {"gradient_norm", s.gradient_norm},
                         {"ratio_min", s.ratio_min},
                         {"ratio_max", s.ratio_max},
                         {"lr", s.lr},
                         {"seconds", Json{{"rollout", s.rollout},
                                          {"compare", s.compare},
                                          {"forward_backward", s.forward_backward},
                                          {"optimizer", s.optimizer},
                                          {"publish", s.publish}}}});
  }
  for (const auto& [version, mean] : c.held_out)
    held.push_back(Json{{"version", version}, {"mean", mean}});
  return Json{{"name", c.name}, {"steps", steps}, {"held_out", held}};
}

std::string CurvesSvg(std::span<const Curves> runs, const std::string& title) {
  constexpr double kWidth = 900, kPanel = 290, kHeight = 170;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" role=\"img\"><style>svg{{background:#fff}}text{{font:12px "
      "system-ui,sans-serif;fill:#1c1f24}}.n{{font-size:10px;fill:#5b6470}}.a{{fill:none;stroke:"
      "#9aa4b0}}.l{{fill:none;stroke-width:1.6}}.c0{{stroke:#1f6feb}}.c1{{stroke:#c0342b}}.c2{{"
      "stroke:"
      "#1a7f4b}}.c3{{stroke:#8250df}}.c4{{stroke:#b35900}}.c5{{stroke:#5b6470}}@media "
      "(prefers-color-scheme:dark){{svg{{background:#14171b}}text{{fill:#e6e9ed}}.n{{fill:#9aa4b0}}"
      "}}"
      "</style>"
      "<text x=\"10\" y=\"20\" font-weight=\"600\">{2}</text>",
      kWidth, 60 + 2 * kHeight, HtmlEscape(title));
  const auto panel = [&](int column, int row, const std::string& name,
                         const std::function<double(const Curves::Step&)>& value) {
    std::vector<Line> lines;
    for (size_t i = 0; i < runs.size(); ++i) {
      Line line{runs[i].name, i, {}};
      for (size_t s = 0; s < runs[i].steps.size(); ++s)
        line.points.emplace_back(static_cast<double>(s), value(runs[i].steps[s]));
      lines.push_back(std::move(line));
    }
    svg += Panel(10 + column * kPanel, 40 + row * kHeight, kPanel - 10, kHeight - 10, name, lines);
  };
  panel(0, 0, "reward of the samples, by step", [](const auto& s) { return s.reward; });
  std::vector<Line> held;
  for (size_t i = 0; i < runs.size(); ++i) {
    Line line{runs[i].name, i, {}};
    for (const auto& [version, mean] : runs[i].held_out)
      line.points.emplace_back(static_cast<double>(version), mean);
    held.push_back(std::move(line));
  }
  svg += Panel(10 + kPanel, 40, kPanel - 10, kHeight - 10, "held-out reward, by update", held);
  panel(2, 0, "loss", [](const auto& s) { return s.loss; });
  panel(0, 1, "gradient norm", [](const auto& s) { return s.gradient_norm; });
  panel(1, 1, "largest importance ratio", [](const auto& s) { return s.ratio_max; });
  // Time by phase of the first run: stacked, from the bottom in the order of the legend.
  std::vector<Line> phases;
  const std::pair<const char*, double Curves::Step::*> parts[] = {
      {"rollout", &Curves::Step::rollout},
      {"compare", &Curves::Step::compare},
      {"forward and backward", &Curves::Step::forward_backward},
      {"optimizer", &Curves::Step::optimizer},
      {"publish", &Curves::Step::publish}};
  for (size_t p = 0; p < std::size(parts) && !runs.empty(); ++p) {
    Line line{parts[p].first, p, {}};
    for (size_t s = 0; s < runs[0].steps.size(); ++s) {
      double sum = 0;
      for (size_t q = 0; q <= p; ++q) sum += runs[0].steps[s].*parts[q].second;
      line.points.emplace_back(static_cast<double>(s), sum);
    }
    phases.push_back(std::move(line));
  }
  svg += Panel(10 + 2 * kPanel, 40 + kHeight, kPanel - 10, kHeight - 10,
               "seconds by phase, added up", phases);
  std::string legend = "lines: ";
  for (const Curves& c : runs) legend += c.name + (&c == &runs.back() ? "" : ", ");
  legend += "; seconds from below: rollout, compare, forward and backward, optimizer, publish";
  return svg + fmt::format("<text class=n x=\"10\" y=\"{:.0f}\">{}</text></svg>\n",
                           52 + 2 * kHeight, HtmlEscape(legend));
}

double LowerBound95(std::span<const double> values) {
  // Student's t, one-sided 0.95, by degrees of freedom from 1.
  constexpr double kT[] = {6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
                           1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
                           1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697};
  TARE_CHECK(values.size() >= 2 && values.size() <= std::size(kT) + 1);
  const double n = static_cast<double>(values.size());
  double mean = 0, squares = 0;
  for (const double v : values) mean += v / n;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return mean - kT[values.size() - 2] * std::sqrt(squares / (n - 1)) / std::sqrt(n);
}

}  // namespace tare::rl
