// The gate table: what loads, what is refused, and that the page and the commands are the table's.

#include "workflow/gates/table.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "workflow/gates/find.h"
#include "workflow/index.h"

namespace tare::workflow {
namespace {

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

std::string TableText() { return ReadAll(TARE_SOURCE_DIR "/src/workflow/gates/workflow.json"); }

// The table with one change, as the loader answers it.
template <typename F>
Status AfterChange(const F& change) {
  auto root = ParseJson(TableText());
  EXPECT_TRUE(root.ok());
  change(*root);
  return ParseWorkflowTable(root->dump()).status();
}

// The board's rules lie below this room and must say what the table says.
TEST(GateTableTest, TheBoardTakesTheTablesEvidence) {
  auto table = ParseWorkflowTable(TableText());
  ASSERT_TRUE(table.ok()) << table.status().ToString();
  for (const GateSpec& gate : table->gates) {
    std::vector<std::string> kinds, needs;
    for (const EvidenceKind kind : KindsThatOpen(gate.id))
      kinds.emplace_back(EvidenceKindName(kind));
    for (const std::string_view step : StepsBefore(gate.id)) needs.emplace_back(step);
    EXPECT_EQ(kinds, gate.evidence) << gate.id;
    if (gate.id == "C9") {
      EXPECT_EQ(needs, gate.needs) << gate.id;
    } else {
      EXPECT_TRUE(needs.empty()) << gate.id;
    }
  }
}

// GEN-24: the eleven gates load, each with its five parts.
TEST(GateTableTest, EmbeddedTableLoads) {
  auto table = ParseWorkflowTable(TableText());
  ASSERT_TRUE(table.ok()) << table.status().ToString();
  ASSERT_EQ(table->gates.size(), 11u);
  EXPECT_EQ(table->problems.size(), 18u);
  EXPECT_EQ(table->stops.size(), 2u);
  EXPECT_EQ(table->ladder.size(), 6u);
  EXPECT_EQ(WorkflowJson(TheWorkflow()), WorkflowJson(*table)) << "the build embeds another table";
}

// GEN-24: 11 gates x 5 parts x (absent, empty, blank, of another type): none loads, and the error
// names gate and part.
TEST(GateTableTest, GateLackingAnyPartDoesNotLoad) {
  int planted = 0;
  for (size_t g = 0; g < kGateIds.size(); ++g) {
    for (const char* part : {"inputs", "action", "pass", "artifacts", "references"}) {
      for (int how = 0; how < 4; ++how) {
        const Status status = AfterChange([&](Json& root) {
          Json& gate = root["gates"][g];
          const bool list = gate[part].is_array();
          if (how == 0) gate.erase(part);
          if (how == 1) gate[part] = list ? Json::array() : Json("");
          if (how == 2) gate[part] = list ? Json::array({" "}) : Json(" \n");
          if (how == 3) gate[part] = true;
        });
        ++planted;
        EXPECT_EQ(status.code(), Code::kInvalidArgument)
            << kGateIds[g] << " " << part << " " << how;
        EXPECT_NE(status.message().find(fmt::format("gate {} ", kGateIds[g])), std::string::npos)
            << status.message();
        EXPECT_NE(status.message().find(fmt::format("`{}`", part)), std::string::npos)
            << status.message();
      }
    }
  }
  EXPECT_EQ(planted, 220);
}

TEST(GateTableTest, OtherFaultsDoNotLoad) {
  const auto refused = [](const auto& change, const char* says) {
    const Status status = AfterChange(change);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << says;
    EXPECT_NE(status.message().find(says), std::string::npos) << status.message();
  };
  refused([](Json& r) { r["gates"].erase(10); }, "10 gates");
  refused([](Json& r) { r["gates"][3]["id"] = "C4"; }, "where gate C3 belongs");
  refused([](Json& r) { r["gates"][3]["needs"] = Json::array({"C5"}); }, "not an earlier gate");
  refused([](Json& r) { r["gates"][3]["needs"] = Json::array({"C3"}); }, "not an earlier gate");
  refused([](Json& r) { r["gates"][3]["evidence"] = Json::array({"E11"}); }, "none of E1 to E10");
  refused([](Json& r) { r["gates"][3]["force"] = true; }, "unknown key `force`");
  refused([](Json& r) { r["gates"][0] = "C0"; }, "is not an object");
  refused([](Json& r) { r["problems"].erase(4); }, "where FIND-05 belongs");
  refused([](Json& r) { r["problems"][4]["gates"] = Json::array({"C11"}); }, "no gate `C11`");
  refused([](Json& r) { r["ladder"].erase(0); }, "where 1 belongs");
  refused([](Json& r) { r["schema"] = "tare.workflow/2"; }, "is not tare.workflow/1");
  refused([](Json& r) { r.erase("stops"); }, "no `stops`");
}

// GEN-22: a table without one of the two human stops is not this workflow, whichever way it is cut.
TEST(GateTableTest, HumanStopsCannotBeEditedAway) {
  for (size_t s = 0; s < 2; ++s) {
    const size_t gate = s == 0 ? 1 : 9;
    EXPECT_FALSE(AfterChange([&](Json& r) { r["stops"].erase(s); }).ok());
    EXPECT_FALSE(AfterChange([&](Json& r) { r["gates"][gate]["stop"] = ""; }).ok());
    EXPECT_FALSE(AfterChange([&](Json& r) {
                   r["stops"].erase(s);
                   r["gates"][gate]["stop"] = "";
                 }).ok());
  }
  EXPECT_FALSE(AfterChange([](Json& r) { r["gates"][9]["stop"] = "after"; }).ok());
}

// GEN-32: the page is the table; an edit by hand of either shows here.
TEST(GateTableTest, PageIsGenerated) {
  EXPECT_EQ(ReadAll(TARE_SOURCE_DIR "/docs/gates.md"), WorkflowMarkdown(TheWorkflow()))
      << "run `tare workflow --markdown > docs/gates.md`";
  auto root = ParseJson(TableText());
  ASSERT_TRUE(root.ok());
  (*root)["gates"][5]["pass"] = "whatever looks close";
  auto edited = ParseWorkflowTable(root->dump());
  ASSERT_TRUE(edited.ok());
  EXPECT_NE(WorkflowMarkdown(*edited), WorkflowMarkdown(TheWorkflow()));
  EXPECT_NE(WorkflowText(*edited), WorkflowText(TheWorkflow()));
}

// GEN-32: a command that the table names is one that the program has.
TEST(GateTableTest, EveryCommandExists) {
  std::set<std::string> existing;
  for (const auto& entry : std::filesystem::directory_iterator(TARE_SOURCE_DIR "/tools")) {
    if (entry.path().extension() != ".cc") continue;
    const std::string text = ReadAll(entry.path());
    // Every way in which a command gives its name: the first string after one of these.
    for (const std::string mark : {"add_subcommand(", "Group(root,", "group,"}) {
      for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos;) {
        at = text.find_first_not_of(" \n", at + mark.size());
        if (at == std::string::npos || text[at] != '"') continue;
        existing.insert(text.substr(at + 1, text.find('"', at + 1) - at - 1));
      }
    }
  }
  ASSERT_TRUE(existing.contains("diff"));
  ASSERT_FALSE(existing.contains("pass-everything"));
  const auto check = [&](const std::string& owner, const std::vector<std::string>& commands) {
    for (const std::string& command : commands) {
      std::istringstream words(command);
      std::string word;
      ASSERT_TRUE(words >> word && word == "tare") << owner << ": " << command;
      while (words >> word) EXPECT_TRUE(existing.contains(word)) << owner << ": " << command;
    }
  };
  for (const GateSpec& g : TheWorkflow().gates) check(g.id, g.commands);
  for (const Problem& p : TheWorkflow().problems) check(p.id, p.commands);
}

// FIND-01 to FIND-18, the routing of each: the right row is first or second for each of at least
// three phrasings. What a row asks beyond its routing is not met by this.
TEST(FindTest, PhrasingsLeadToTheirRow) {
  std::istringstream lines(ReadAll(TARE_SOURCE_DIR "/tests/data/find/phrasings.tsv"));
  std::map<std::string, int> per_row;
  int all = 0, first = 0;
  for (std::string line; std::getline(lines, line); ++all) {
    const size_t tab = line.find('\t');
    ASSERT_NE(tab, std::string::npos) << line;
    const std::string id = line.substr(0, tab);
    const auto matches = FindProblems(TheWorkflow(), line.substr(tab + 1), 2);
    bool found = false;
    std::string got;
    for (const Match& m : matches) {
      found = found || m.problem->id == id;
      got += fmt::format(" {} ({:.1f})", m.problem->id, m.score);
    }
    EXPECT_TRUE(found) << line << " ->" << got;
    first += !matches.empty() && matches[0].problem->id == id ? 1 : 0;
    ++per_row[id];
  }
  EXPECT_GE(all, 60);
  EXPECT_EQ(per_row.size(), 18u);
  for (const auto& [id, count] : per_row) EXPECT_GE(count, 3) << id;
  RecordProperty("ranked_first", first);
}

TEST(FindTest, WhatIsNotThereIsNotFound) {
  EXPECT_TRUE(FindProblems(TheWorkflow(), "my sourdough bread collapsed").empty());
  EXPECT_TRUE(FindProblems(TheWorkflow(), "").empty());
  EXPECT_TRUE(FindProblems(TheWorkflow(), "the of and why").empty());
  EXPECT_TRUE(FindProblems(TheWorkflow(), std::string("\xff\x00\x1b[31m", 7)).empty());
}

}  // namespace
}  // namespace tare::workflow
