#include "workflow/gates/table.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace tare::workflow {

// The bytes of workflow.json, from the build.
extern const std::string_view kWorkflowJson;

namespace {

// Reads the members of one object; each asked for once, and none left over.
class Members {
 public:
  Members(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) Fail("is not an object");
  }

  void Text(const char* key, std::string* out, bool may_be_empty = false) {
    const Json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_string()) return Fail(fmt::format("`{}` is not a string", key));
    *out = value->get<std::string>();
    if (!may_be_empty && Blank(*out)) Fail(fmt::format("`{}` is empty", key));
  }
  void Texts(const char* key, std::vector<std::string>* out, bool may_be_empty = false) {
    const Json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_array()) return Fail(fmt::format("`{}` is not a list of strings", key));
    for (const Json& item : *value) {
      if (!item.is_string() || Blank(item.get<std::string>())) {
        return Fail(fmt::format("`{}` holds something else than a non-empty string", key));
      }
      out->push_back(item.get<std::string>());
    }
    if (!may_be_empty && out->empty()) Fail(fmt::format("`{}` is empty", key));
  }
  void Number(const char* key, int* out) {
    const Json* value = Get(key);
    if (value == nullptr) return;
    if (!value->is_number_integer() || *value < 0 || *value > 1000) {
      return Fail(fmt::format("`{}` is not a small integer", key));
    }
    *out = value->get<int>();
  }
  const Json* List(const char* key) {
    const Json* value = Get(key);
    if (value != nullptr && (!value->is_array() || value->empty())) {
      Fail(fmt::format("`{}` is not a non-empty list", key));
      return nullptr;
    }
    return value;
  }
  Status Done() {
    if (status_.ok()) {
      for (const auto& [key, value] : object_.items()) {
        if (!seen_.contains(key)) Fail(fmt::format("has an unknown key `{}`", Printable(key)));
      }
    }
    return status_;
  }

 private:
  static bool Blank(const std::string& text) {
    return text.find_first_not_of(" \t\r\n") == std::string::npos;
  }
  const Json* Get(const char* key) {
    seen_.insert(key);
    if (!object_.is_object()) return nullptr;
    auto it = object_.find(key);
    if (it != object_.end()) return &*it;
    Fail(fmt::format("has no `{}`", key));
    return nullptr;
  }
  void Fail(const std::string& what) {
    if (status_.ok()) status_ = InvalidArgument("workflow table: {} {}", where_, what);
  }

  const Json& object_;
  std::string where_;
  std::set<std::string> seen_;
  Status status_;
};

Status CheckKinds(const GateSpec& gate) {
  for (const std::string& kind : gate.evidence) {
    bool known = false;
    for (int k = 1; k <= 10; ++k) known = known || kind == fmt::format("E{}", k);
    if (!known) {
      return InvalidArgument("workflow table: gate {}: evidence `{}` is none of E1 to E10", gate.id,
                             kind);
    }
  }
  return Ok();
}

Result<GateSpec> ReadGate(const Json& object, size_t index) {
  const std::string id(kGateIds[index]);
  GateSpec gate;
  Members members(object, fmt::format("gate {}", id));
  members.Text("id", &gate.id);
  members.Text("title", &gate.title);
  members.Texts("inputs", &gate.inputs);
  members.Text("action", &gate.action);
  members.Text("pass", &gate.pass);
  members.Texts("artifacts", &gate.artifacts);
  members.Texts("references", &gate.references);
  members.Texts("needs", &gate.needs, /*may_be_empty=*/true);
  members.Texts("evidence", &gate.evidence);
  members.Text("stop", &gate.stop, /*may_be_empty=*/true);
  members.Texts("commands", &gate.commands);
  members.Text("open", &gate.open);
  TARE_RETURN_IF_ERROR(members.Done());
  if (gate.id != id) {
    return InvalidArgument("workflow table: `{}` stands where gate {} belongs", Printable(gate.id),
                           id);
  }
  for (const std::string& need : gate.needs) {
    const auto end = kGateIds.begin() + static_cast<std::ptrdiff_t>(index);
    if (std::find(kGateIds.begin(), end, need) == end) {
      return InvalidArgument("workflow table: gate {} needs `{}`, which is not an earlier gate", id,
                             Printable(need));
    }
  }
  if (!gate.stop.empty() && gate.stop != "before" && gate.stop != "after") {
    return InvalidArgument("workflow table: gate {}: stop `{}` is neither `before` nor `after`", id,
                           Printable(gate.stop));
  }
  TARE_RETURN_IF_ERROR(CheckKinds(gate));
  return gate;
}

Status CheckStops(const WorkflowTable& table) {
  for (const Stop& stop : table.stops) {
    const GateSpec* gate = table.Find(stop.id);
    if (gate == nullptr || stop.when != gate->stop + " " + gate->id) {
      return InvalidArgument("workflow table: the stop at `{}` ({}) is not what its gate says",
                             Printable(stop.id), Printable(stop.when));
    }
  }
  for (const GateSpec& gate : table.gates) {
    const auto count = std::count_if(table.stops.begin(), table.stops.end(),
                                     [&](const Stop& stop) { return stop.id == gate.id; });
    if (count != (gate.stop.empty() ? 0 : 1)) {
      return InvalidArgument("workflow table: gate {} has {} stops, its `stop` says otherwise",
                             gate.id, count);
    }
  }
  // These two are never skipped, so a table without them is not this workflow.
  for (const char* id : {"C1", "C9"}) {
    if (table.Find(id)->stop.empty()) {
      return InvalidArgument("workflow table: gate {} has no human stop", id);
    }
  }
  return Ok();
}

}  // namespace

const GateSpec* WorkflowTable::Find(std::string_view id) const {
  for (const GateSpec& gate : gates) {
    if (gate.id == id) return &gate;
  }
  return nullptr;
}

Result<WorkflowTable> ParseWorkflowTable(std::string_view json) {
  TARE_ASSIGN_OR_RETURN(Json root, ParseJson(json));
  WorkflowTable table;
  Members members(root, "the file");
  std::string schema;
  members.Text("schema", &schema);
  const Json* gates = members.List("gates");
  const Json* ladder = members.List("ladder");
  members.Texts("rules", &table.rules);
  members.Texts("delivery", &table.delivery);
  members.Texts("tracks", &table.tracks);
  const Json* stops = members.List("stops");
  const Json* problems = members.List("problems");
  TARE_RETURN_IF_ERROR(members.Done());
  if (schema != "tare.workflow/1") {
    return InvalidArgument("workflow table: schema `{}` is not tare.workflow/1", Printable(schema));
  }
  if (gates->size() != kGateIds.size()) {
    return InvalidArgument("workflow table: {} gates, not the eleven C0 to C10", gates->size());
  }
  for (size_t i = 0; i < gates->size(); ++i) {
    TARE_ASSIGN_OR_RETURN(GateSpec gate, ReadGate((*gates)[i], i));
    table.gates.push_back(std::move(gate));
  }
  for (const Json& item : *ladder) {
    const int expected = static_cast<int>(table.ladder.size()) + 1;
    Rung rung;
    Members m(item, fmt::format("rung {}", expected));
    m.Number("rung", &rung.rung);
    m.Text("level", &rung.level);
    m.Text("probe", &rung.probe);
    TARE_RETURN_IF_ERROR(m.Done());
    if (rung.rung != expected) {
      return InvalidArgument("workflow table: rung {} stands where {} belongs", rung.rung,
                             expected);
    }
    table.ladder.push_back(std::move(rung));
  }
  for (const Json& item : *stops) {
    Stop stop;
    Members m(item, fmt::format("stop {}", table.stops.size() + 1));
    m.Text("id", &stop.id);
    m.Text("when", &stop.when);
    m.Text("title", &stop.title);
    m.Text("text", &stop.text);
    TARE_RETURN_IF_ERROR(m.Done());
    table.stops.push_back(std::move(stop));
  }
  TARE_RETURN_IF_ERROR(CheckStops(table));
  for (const Json& item : *problems) {
    const std::string id = fmt::format("FIND-{:02}", table.problems.size() + 1);
    Problem problem;
    Members m(item, fmt::format("problem {}", id));
    m.Text("id", &problem.id);
    m.Text("problem", &problem.problem);
    m.Text("section", &problem.section);
    m.Texts("gates", &problem.gates);
    m.Text("first", &problem.first);
    m.Texts("commands", &problem.commands);
    m.Text("words", &problem.words);
    TARE_RETURN_IF_ERROR(m.Done());
    if (problem.id != id) {
      return InvalidArgument("workflow table: problem `{}` stands where {} belongs",
                             Printable(problem.id), id);
    }
    for (const std::string& gate : problem.gates) {
      if (table.Find(gate) == nullptr) {
        return InvalidArgument("workflow table: problem {}: no gate `{}`", id, Printable(gate));
      }
    }
    table.problems.push_back(std::move(problem));
  }
  return table;
}

const WorkflowTable& TheWorkflow() {
  static const WorkflowTable* table = [] {
    auto parsed = ParseWorkflowTable(kWorkflowJson);
    TARE_CHECK(parsed.ok());  // GateTableTest.EmbeddedTableLoads says why it is not
    return new WorkflowTable(std::move(*parsed));
  }();
  return *table;
}

}  // namespace tare::workflow
