#pragma once

// Shared by the two forms of a report.

#include <string>
#include <string_view>

#include "workflow/report/report.h"

namespace tare::workflow {

std::string HtmlText(std::string_view text);  // & < > " escaped, unprintable bytes shown
// An <svg> of one plot that follows the page's colours, with a table of its numbers below it for
// readers of print and screen readers.
std::string PlotSvg(const Plot& plot);
// "0.00012", "1,587", "3.4e+38": six digits at most.
std::string NumberText(double value);

// "b1|b2; 1; bf16; ...": a box in one line.
std::string BoxText(const ScopeBox& box);

// What no report of ours claims, in every report.
std::span<const std::string_view> ReportLimits();

}  // namespace tare::workflow
