// The report as one HTML page: its own style, drawings inline, no script, nothing from outside.

#include <algorithm>

#include "base/reasons.h"
#include "base/verdict.h"
#include "workflow/report/render.h"

namespace tare::workflow {
namespace {

// Light and dark from one set of names; on paper the light ones, links written out.
constexpr char kStyle[] = R"css(
:root{--bg:#fff;--fg:#1c1f24;--soft:#5b6470;--line:#d8dde3;--card:#f6f7f9;--ok:#17683e;--bad:#b3261e;--wait:#8a5a00;--link:#1f5fbf;
--c0:#1f5fbf;--c1:#b3261e;--c2:#17683e;--c3:#8a5a00;--c4:#6f42c1;--c5:#0f766e}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa4b0;--line:#2d333b;--card:#1b1f25;--ok:#4cc38a;--bad:#ff8a80;--wait:#f0b429;--link:#7ab0ff;
--c0:#7ab0ff;--c1:#ff8a80;--c2:#4cc38a;--c3:#f0b429;--c4:#c4a7ff;--c5:#5eead4}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444;--line:#bbb;--card:#fff;--ok:#000;--bad:#000;--wait:#000;--link:#000;--c0:#000;--c1:#555;--c2:#888;--c3:#333;--c4:#777;--c5:#aaa}
details>*{display:block}section,tr,svg{break-inside:avoid}nav{display:none}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 60px}h1{font-size:24px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 8px}
p{margin:6px 0}.soft{color:var(--soft)}a{color:var(--link)}nav{margin:12px 0;font-size:14px}nav a{display:inline-block;margin-right:12px;white-space:nowrap}
.pass{color:var(--ok);font-weight:600}.fail,.refused{color:var(--bad);font-weight:600}.other{color:var(--wait);font-weight:600}
.four{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:12px}.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.card h3{margin:0 0 4px;font-size:15px}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;margin:8px 0;font-size:14px}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:13px/1.45 ui-monospace,monospace;overflow-wrap:anywhere}li{margin:3px 0;overflow-wrap:anywhere}td{overflow-wrap:anywhere;min-width:3.5em}
.plot{width:100%;max-width:720px;height:auto;display:block}.plot text{fill:var(--fg);font:11px system-ui,sans-serif}.plot .grid{stroke:var(--line)}
.plot path{fill:none;stroke:currentColor;stroke-width:1.8}.plot circle{fill:currentColor}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:5px;background:currentColor;margin-right:5px}.key{margin-right:14px;font-size:13px}
)css";

std::string Href(std::string_view base, std::string_view path) {
  std::string out;
  for (const char c : fmt::format("{}{}", base, path)) {
    const auto u = static_cast<unsigned char>(c);
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("-._~/").find(c) != std::string_view::npos;
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", u);
    }
  }
  return out;
}

std::string Link(const Source& source, std::string_view base) {
  if (source.run_id.empty()) return "-";
  if (source.artifact.empty()) return fmt::format("<code>{}</code>", HtmlText(source.run_id));
  return fmt::format("<a href=\"{}\" title=\"run {}\"><code>{}</code></a>",
                     Href(base, source.artifact), HtmlText(source.run_id),
                     HtmlText(source.artifact));
}

std::string Links(const std::vector<Source>& sources, std::string_view base) {
  std::string out;
  for (const Source& s : sources) out += (out.empty() ? "" : "<br>") + Link(s, base);
  return out.empty() ? "-" : out;
}

std::string StateWord(std::string_view word) {
  const std::string_view kind = word == "pass" || word == "open" ? "pass"
                                : word == "fail"                 ? "fail"
                                : word == "refused"              ? "refused"
                                                                 : "other";
  return fmt::format("<span class={}>{}</span>", kind, HtmlText(word));
}

std::string Reason(std::string_view code) {
  const tare::Reason* known = FindReason(code);
  if (code.empty()) return "";
  if (known == nullptr) return fmt::format("<code>{}</code>", HtmlText(code));
  return fmt::format("<code>{}</code><br>{}<br><span class=soft>next: {}</span>", HtmlText(code),
                     HtmlText(known->sentence), HtmlText(known->next));
}

std::string Table(std::string_view head, const std::string& rows) {
  return fmt::format("<div class=scroll><table>{}{}</table></div>", head, rows);
}

std::string Section(std::string_view id, std::string_view title, const std::string& content) {
  return fmt::format("<section id={}><h2>{}</h2>{}</section>\n", id, title,
                     content.empty() ? "<p>none</p>" : content);
}

}  // namespace

std::string ReportHtml(const TaskReport& r, std::string_view base) {
  std::string four = "<div class=four>";
  for (const Acceptance& a : r.acceptances) {
    four += fmt::format(
        "<div class=card><h3>{}</h3><p>{}</p><p class=soft>{}</p>{}<p>{}</p><p>{}</p></div>",
        a.name, StateWord(VerdictName(a.verdict)), a.asks,
        a.reason.empty() ? "" : fmt::format("<p>{}</p>", Reason(a.reason)), HtmlText(a.detail),
        Links(a.sources, base));
  }
  four +=
      "</div><p class=soft>These four are accepted apart; there is no fifth that joins them.</p>";

  std::string board;
  for (const BoardLine& b : r.board) {
    board += fmt::format("<tr><td>{}<td>{}<td>{}<td>{}<td class=n>{}", b.step,
                         StateWord(b.verdict == Verdict::kPass ? "open" : VerdictName(b.verdict)),
                         Reason(b.reason), HtmlText(b.detail), b.runs);
  }
  board = Table("<tr><th>gate<th>state<th>reason<th>detail<th class=n>runs", board);

  std::string judgements;
  for (const GateFindings& g : r.judgements) {
    std::string rows;
    for (const auto& [row, text] : g.findings) {
      rows += fmt::format("<tr><td>{}<td>{}", HtmlText(row), HtmlText(text));
    }
    judgements += fmt::format("<p><b>{}</b> {} {}: {} obligations held, {} did not. {}</p>",
                              HtmlText(g.gate), StateWord(g.verdict), HtmlText(g.reason), g.passed,
                              g.findings.size(), Link(g.source, base));
    if (!rows.empty()) judgements += Table("<tr><th>row<th>finding", rows);
  }

  std::string evidence;
  for (const EvidenceLine& e : r.evidence) {
    evidence += fmt::format("<tr><td>{} {}<td>{}<td>{} {}<td>{}<td>{}<td>{}",
                            EvidenceKindName(e.kind), EvidenceKindText(e.kind), e.step,
                            StateWord(VerdictName(e.verdict)), HtmlText(e.reason),
                            HtmlText(e.detail), HtmlText(e.finished), Link(e.source, base));
  }
  if (!evidence.empty()) {
    evidence = Table("<tr><th>kind<th>step<th>verdict<th>detail<th>finished<th>from", evidence);
  }

  std::string scope;
  for (const ScopeLine& s : r.scope) {
    scope += fmt::format("<li>{} at {}: {}<br>{}", EvidenceKindName(s.kind), s.step,
                         HtmlText(BoxText(s.box)), Link(s.source, base));
  }
  if (!scope.empty()) scope = "<ul>" + scope + "</ul>";
  std::string open;
  for (const std::string& line : r.not_covered) open += "<li>" + HtmlText(line);
  std::string failed;
  for (const auto& [text, source] : r.failed) {
    failed += fmt::format("<li>{}<br>{}", HtmlText(text), Link(source, base));
  }
  if (!failed.empty()) failed = "<ul>" + failed + "</ul>";

  std::string compared;
  for (const MismatchLine& m : r.mismatches) {
    compared += fmt::format("<tr><td>{}<td class=n>{}<td class=n>{}<td>{}<td>{} {}<td>{}",
                            HtmlText(m.what), NumberText(static_cast<double>(m.compared)),
                            NumberText(static_cast<double>(m.mismatches)), HtmlText(m.first),
                            StateWord(m.verdict), HtmlText(m.reason), Link(m.source, base));
  }
  if (!compared.empty()) {
    compared = Table(
        "<tr><th>what<th class=n>compared<th class=n>differ<th>first<th>verdict<th>from", compared);
  }

  std::string curves;
  for (const Plot& p : r.plots) {
    curves += fmt::format("<h3>{}</h3>{}<p>{}</p>", HtmlText(p.title), PlotSvg(p),
                          Links(p.sources, base));
  }

  std::string stops;
  for (const HumanStop& s : r.stops) {
    stops += fmt::format(
        "<div class=card><h3>{} {}</h3><p>{} {}</p><p>{}</p><p>{}</p><p>Materials: {}</p></div>",
        s.step, HtmlText(s.title), StateWord(VerdictName(s.verdict)), HtmlText(s.reason),
        HtmlText(s.detail), HtmlText(s.text), Links(s.materials, base));
  }

  std::string limits = "<ul>";
  for (const std::string_view line : ReportLimits())
    limits += fmt::format("<li>{}", HtmlText(line));
  for (const std::string& line : r.skipped) limits += "<li>Not read: " + HtmlText(line);
  limits += "</ul>";

  return fmt::format(
             "<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport "
             "content=\"width=device-width,initial-scale=1\"><meta "
             "http-equiv=Content-Security-Policy "
             "content=\"default-src 'none'; style-src "
             "'unsafe-inline'\"><title>{0}</title><style>{1}</style>"
             "</head><body><main><h1>{0}</h1><p class=soft>Task <code>{2}</code>, created {3}; log "
             "of {4} "
             "events up to {5}, head <code>{6}</code>. Made from the log and its "
             "artifacts.</p><nav>"
             "<a href=#board>gates</a><a href=#judgements>judgements</a><a "
             "href=#evidence>evidence</a>"
             "<a href=#scope>scope</a><a href=#open>not covered</a><a href=#failed>failed</a>"
             "<a href=#compared>comparisons</a><a href=#curves>curves</a><a href=#stops>human "
             "stops</a>"
             "<a href=#limits>limits</a></nav>\n",
             HtmlText(r.name.empty() ? "Tare task" : r.name), kStyle, HtmlText(r.task_id),
             HtmlText(r.created), r.events, HtmlText(r.latest_time), r.head) +
         Section("acceptances", "Acceptances", four) + Section("board", "Gates", board) +
         Section("judgements", "Judgements", judgements) +
         Section("evidence", "Evidence by kind", evidence) + Section("scope", "Scope", scope) +
         Section("open", "Not covered", "<ul>" + open + "</ul>") +
         Section("failed", "Failed, stale and excluded", failed) +
         Section("compared", "Comparisons", compared) + Section("curves", "Curves", curves) +
         Section("stops", "Human stops", stops) + Section("limits", "Limits", limits) +
         "</main></body></html>\n";
}

}  // namespace tare::workflow
