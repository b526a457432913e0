#include "rl/html_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/html.h"
#include "base/reasons.h"

namespace tare::rl {
namespace {

constexpr char kStyle[] = R"css(
:root{--bg:#fff;--fg:#1c1f24;--soft:#5b6470;--line:#d8dde3;--card:#f6f7f9;--ok:#1a7f4b;--bad:#c0342b;--eq:#a9d8bd;--none:#e9ecf0}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa4b0;--line:#2d333b;--card:#1b1f25;--ok:#4cc38a;--bad:#ff7b72;--eq:#1f6a45;--none:#242a31}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:980px;margin:0 auto;padding:28px 20px 60px}h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 8px}h3{font-size:15px;margin:20px 0 6px}
p{margin:6px 0}.soft{color:var(--soft)}.ok{color:var(--ok);font-weight:600}.bad{color:var(--bad);font-weight:600}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px;margin:12px 0}
table{border-collapse:collapse;width:100%;margin:8px 0;font-size:14px}th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}code,pre{font:13px/1.45 ui-monospace,monospace}pre{overflow-x:auto;margin:6px 0}
.scroll{overflow-x:auto}svg text{fill:var(--fg);font:11px system-ui,sans-serif}
)css";

std::string Short(const Json& hash) {
  return hash.is_string() ? hash.get<std::string>().substr(0, 12) : "none";
}

// Tokens from left to right, layers from bottom to top as data flows.
std::string Draw(const Picture& p) {
  constexpr int kCell = 13, kLeft = 80, kTop = 8;
  const int columns = static_cast<int>(p.tokens.size()), rows = static_cast<int>(p.rows.size());
  const int width = kLeft + std::max(columns * kCell, 330) + 10, height = kTop + rows * kCell + 26;
  std::string svg = fmt::format(
      "<div class=scroll><svg role=img aria-label=\"equality by token and layer\" width={0} "
      "height={1} "
      "viewBox=\"0 0 {0} {1}\">",
      width, height);
  for (int r = 0; r < rows; ++r) {
    const int y = kTop + (rows - 1 - r) * kCell;
    const size_t row = static_cast<size_t>(r);
    svg += fmt::format("<text x=0 y={}>{}</text>", y + 10, HtmlEscape(p.rows[row]));
    for (int c = 0; c < columns; ++c) {
      const int64_t all = p.compared[row][static_cast<size_t>(c)];
      const int64_t bad = p.differing[row][static_cast<size_t>(c)];
      const char* fill = all == 0 ? "var(--none)" : bad == 0 ? "var(--eq)" : "var(--bad)";
      const double share = all == 0 ? 0 : static_cast<double>(bad) / static_cast<double>(all);
      const double opacity = bad == 0 ? 1.0 : 0.35 + 0.65 * std::sqrt(share);
      svg += fmt::format(
          "<rect x={} y={} width={} height={} rx=2 fill=\"{}\" fill-opacity=\"{:.2f}\"><title>{}, "
          "position {}: {} of "
          "{} values differ</title></rect>",
          kLeft + c * kCell, y, kCell - 2, kCell - 2, fill, opacity, HtmlEscape(p.rows[row]), c,
          bad, all);
    }
  }
  return svg +
         fmt::format(
             "<text x={} y={}>position in the sequence, 0 to {}; layers upwards</text></svg></div>",
             kLeft, height - 8, columns - 1);
}

double Milliseconds(const Json& ns) { return ns.is_number() ? ns.get<double>() * 1e-6 : 0; }
double Span(const Json& part) {
  return Milliseconds(part.at("ended_ns")) - Milliseconds(part.at("started_ns"));
}

std::string Words(const Json& receipt) {
  std::string html;
  for (const Json& round : receipt.value("rounds", Json::array())) {
    const Json& w = round.at("weights");
    html += fmt::format(
        "<p><b>theta{}</b>: {} samples, {} tokens. The engine holds weights <code>{}</code>, the "
        "trainer "
        "<code>{}</code>.",
        round.at("version").dump(), round.at("rollout").at("sequences").dump(),
        round.at("rollout").at("tokens").dump(), HtmlEscape(Short(w.at("engine_held"))),
        HtmlEscape(Short(w.at("trainer_deployed"))));
    if (round.contains("reward")) {
      html += fmt::format(" Mean reward {:.3f}.", round.at("reward").at("mean").get<double>());
    }
    html += "</p>";
  }
  for (const Json& u : receipt.value("updates", Json::array())) {
    int64_t elements = 0, master = 0, deployed = 0, parameters = 0, reached = 0;
    for (const Json& p : u.at("parameters")) {
      ++parameters;
      reached += p.at("gradient_nonzero").get<int64_t>() > 0;
      elements += p.at("elements").get<int64_t>();
      master += p.at("master_changed").get<int64_t>();
      deployed += p.at("deployed_changed").get<int64_t>();
    }
    html += fmt::format(
        "<p><b>Update of theta{}</b> ({}): gradient norm {:.4g}; {} of {} parameters have a "
        "gradient; {} of {} master "
        "values and {} deployed values changed; the importance ratio is other than exactly 1 at {} "
        "of {} tokens; {} kernels of the backward walk ran.</p>",
        u.at("from").dump(), HtmlEscape(u.at("loss_kind").get<std::string>()),
        u.at("gradient_norm").get<double>(), reached, parameters, master, elements, deployed,
        u.at("ratio_not_one").dump(), u.at("valid_tokens").dump(), u.at("backward_kernels").dump());
  }
  html += "<p>";
  for (const Json& p : receipt.value("processes", Json::array())) {
    const bool normal = p.at("ended").get<bool>() && p.at("signal") == 0 && p.at("code") == 0;
    html += fmt::format("Process {} ended {}. ", HtmlEscape(p.at("name").get<std::string>()),
                        normal ? "normally" : "abnormally");
  }
  html += "</p>";
  if (const double peak = receipt.value("peak_rss_bytes", 0.0); peak > 0) {
    html += fmt::format("<p>Both processes together held at most {:.2f} GiB at one moment.</p>",
                        peak / (1 << 30));
  }
  return html;
}

std::string Times(const Json& receipt) {
  const Json rounds = receipt.value("rounds", Json::array()),
             updates = receipt.value("updates", Json::array());
  std::string html = "<table><tr><th>phase, ms";
  for (size_t i = 0; i < rounds.size(); ++i) html += fmt::format("<th class=n>theta{}", i);
  const auto row = [&](const char* name, const Json& list, const auto& milliseconds) {
    html += fmt::format("<tr><td>{}", name);
    for (size_t i = 0; i < rounds.size(); ++i) {
      html += i < list.size() ? fmt::format("<td class=n>{:.0f}", milliseconds(list[i]))
                              : "<td class=n>-";
    }
  };
  row("rollout", rounds, [](const Json& r) { return Span(r.at("rollout")); });
  row("score without gradients", rounds,
      [](const Json& r) { return Span(r.at("paths").at("score")); });
  row("forward, loss and backward", updates,
      [](const Json& u) { return Milliseconds(u.at("forward_backward_ns")); });
  row("optimizer", updates, [](const Json& u) { return Milliseconds(u.at("optimizer_ns")); });
  row("hashes of the weights after it", updates,
      [](const Json& u) { return Milliseconds(u.value("hash_ns", Json(0))); });
  row("publish: write", updates,
      [](const Json& u) { return Milliseconds(u.at("publish").at("write_ns")); });
  row("publish: load in the engine", updates,
      [](const Json& u) { return Milliseconds(u.at("publish").at("update_ns")); });
  return html + "</table>";
}

std::string PictureOf(const ReportRun& run) {
  std::string html = "<h3>Equality by token and layer, one request on both sides</h3>";
  if (run.picture.tokens.empty())
    return html + fmt::format("<p class=soft>{}</p>", HtmlEscape(run.picture_note));
  int64_t all = 0, bad = 0;
  for (size_t r = 0; r < run.picture.rows.size(); ++r) {
    for (size_t c = 0; c < run.picture.tokens.size(); ++c) {
      all += run.picture.compared[r][c];
      bad += run.picture.differing[r][c];
    }
  }
  return html + Draw(run.picture) +
         fmt::format(
             "<p class=soft>{} values compared, {} differ. Green: every bit equal; red: deeper "
             "where more "
             "differ; grey: not compared.</p>",
             all, bad);
}

std::string Run(const ReportRun& run) {
  const Judgement& j = run.judgement;
  const bool as_expected = VerdictName(j.verdict) == run.expected;
  std::string html =
      fmt::format("<h2>{}</h2><p>Verdict <span class={}>{}</span>{}{}, expected {}. {:.1f} s.</p>",
                  HtmlEscape(run.title), as_expected ? "ok" : "bad", VerdictName(j.verdict),
                  j.reason.empty() ? "" : ": ", j.reason, HtmlEscape(run.expected), run.seconds);
  if (const Reason* r = FindReason(j.reason); r != nullptr) {
    html += fmt::format("<p class=soft>In words: {}.</p>", HtmlEscape(r->sentence));
  }
  html +=
      "<div class=scroll><table><tr><th>weights<th>compared<th class=n>tokens<th class=n>differ in "
      "a bit<th "
      "class=n>largest difference<th>first";
  for (const auto& c : j.comparisons) {
    html += fmt::format(
        "<tr><td>theta{}<td>{} and {}<td class=n>{}<td class=\"n {}\">{}<td "
        "class=n>{:.3g}<td><code>{}"
        "</code>",
        c.version, c.a, c.b, c.compared, c.mismatches == 0 ? "ok" : "bad", c.mismatches, c.max_abs,
        HtmlEscape(c.first));
  }
  html += "</table></div>";
  if (run.locate.is_object()) {
    const Json site = run.locate.value("site", Json(nullptr));
    if (site.is_object()) {
      html += fmt::format(
          "<div class=card><p>First operator that differs, from the dumps of both sides: <b>{}</b> "
          "at "
          "<code>{}</code>, position {}.</p></div>",
          HtmlEscape(site.value("op", "")), HtmlEscape(site.value("name", "")),
          site.value("position", Json(-1)).dump());
    } else {
      html +=
          fmt::format("<p class=soft>Locating: {}</p>", HtmlEscape(run.locate.value("why", "")));
    }
  }
  html += PictureOf(run) + "<h3>The receipt in words</h3>" + Words(run.receipt) + "<h3>Times</h3>" +
          Times(run.receipt);
  if (!j.findings.empty()) {
    html += "<h3>Findings</h3><table>";
    for (size_t i = 0; i < j.findings.size() && i < 12; ++i) {
      html += fmt::format("<tr><td>{}<td>{}<td>{}", VerdictName(j.findings[i].verdict),
                          j.findings[i].reason, HtmlEscape(j.findings[i].text));
    }
    html += "</table>";
  }
  return html + fmt::format("<pre>{}</pre>", HtmlEscape(run.command));
}

}  // namespace

std::string HtmlReport(const ReportInput& input) {
  std::string html =
      "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
      "content=\"width=device-width,initial-scale=1\"><title>Tare: rollout and training, bit by "
      "bit</title><style>";
  html += kStyle;
  html += fmt::format(
      "</style><main><h1>Rollout and training, bit by bit</h1><p class=soft>{}; profile {}; {}; "
      "{:.1f} "
      "s</p><div class=card><p class={}>{}</p><p>A serving engine samples; a trainer in another "
      "process "
      "scores the same tokens without and with gradients, trains on them and publishes its "
      "weights; "
      "twice. Before and after each update all logprobs are compared as 32-bit words.</p></div>",
      HtmlEscape(input.model), HtmlEscape(input.profile), HtmlEscape(input.started), input.seconds,
      input.pass ? "ok" : "bad",
      input.pass ? "Every run ended as expected." : "A run did not end as expected.");
  for (const ReportRun& run : input.runs) html += Run(run);
  return html +
         "<h2>What this does not cover</h2><ul><li>Other models, devices, topologies and options "
         "than those "
         "above.<li>Quality: a reward that moves in two steps says nothing about it.<li>Speed: "
         "times are of this "
         "machine under whatever else it did.<li>Logprobs of other engines or "
         "trainers.</ul></main></html>\n";
}

}  // namespace tare::rl
