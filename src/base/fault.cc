#include "base/fault.h"

#include <algorithm>

namespace tare::fault {
namespace {

std::vector<Fault*>& Registry() {
  static auto* registry = new std::vector<Fault*>();
  return *registry;
}

Fault* Find(std::string_view name) {
  for (Fault* f : Registry()) {
    if (name == f->name) return f;
  }
  return nullptr;
}

}  // namespace

std::string_view SideName(Side side) {
  switch (side) {
    case Side::kNone:
      return "none";
    case Side::kRollout:
      return "rollout";
    case Side::kTrainer:
      return "trainer";
  }
  return "unknown";
}

Fault::Fault(const char* name, const char* site, const char* gates, const char* text)
    : name(name), site(site), gates(gates), text(text) {
  TARE_CHECK(Find(name) == nullptr) << "fault declared twice: " << name;
  Registry().push_back(this);
}

std::vector<const Fault*> All() {
  std::vector<const Fault*> all(Registry().begin(), Registry().end());
  std::sort(all.begin(), all.end(), [](const Fault* a, const Fault* b) {
    return std::string_view(a->name) < std::string_view(b->name);
  });
  return all;
}

void Clear() {
  for (Fault* f : Registry()) f->active_on.store(0);
}

Status Select(std::string_view spec) {
  std::vector<std::pair<Fault*, uint32_t>> chosen;
  while (!spec.empty()) {
    const size_t comma = spec.find(',');
    const std::string_view item = spec.substr(0, comma);
    spec = comma == std::string_view::npos ? std::string_view() : spec.substr(comma + 1);
    const size_t at = item.find('@');
    const std::string_view name = item.substr(0, at);
    const std::string_view side = at == std::string_view::npos ? "" : item.substr(at + 1);
    uint32_t mask = 0;
    if (side == "rollout") mask = 1;
    if (side == "trainer") mask = 2;
    if (side == "both") mask = 7;
    if (side == "none") mask = 4;
    if (mask == 0) {
      return InvalidArgument("fault '{}': after '@' say rollout, trainer, both or none", item);
    }
    Fault* fault = Find(name);
    if (fault == nullptr) {
      std::string near;
      const std::string_view site = name.substr(0, name.find('.'));
      for (const Fault* f : All()) {
        if (std::string_view(f->name).substr(0, site.size()) == site)
          near += fmt::format(" {}", f->name);
      }
      return InvalidArgument("no fault is named '{}';{}", name,
                             near.empty() ? " `tare fault list` prints all" : " near:" + near);
    }
    chosen.emplace_back(fault, mask);
  }
  Clear();
  for (auto& [fault, mask] : chosen) fault->active_on.fetch_or(mask);
  return Ok();
}

std::string Selected() {
  std::string spec;
  for (const Fault* f : All()) {
    const uint32_t mask = f->active_on.load();
    const auto add = [&](const char* side) {
      spec += fmt::format("{}{}@{}", spec.empty() ? "" : ",", f->name, side);
    };
    if (mask == 7) {
      add("both");
      continue;
    }
    if (mask & 1) add("rollout");
    if (mask & 2) add("trainer");
    if (mask & 4) add("none");
  }
  return spec;
}

Scoped::Scoped(std::string_view spec) : before_(Selected()) {
  const Status status = Select(spec);
  TARE_CHECK(status.ok()) << status.ToString();
}

Scoped::~Scoped() {
  const Status status = Select(before_);
  TARE_CHECK(status.ok()) << status.ToString();
}

}  // namespace tare::fault
