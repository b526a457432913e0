#pragma once

// `tare demo --workflow`: a task from `tare init` through every gate to its two human stops, where
// it ends: Tare owns no key and signs nothing.

#include <string>

namespace tare {

struct WorkflowDemo {
  std::string program;  // the tare executable
  std::string model;    // checkpoint folder
  std::string out;      // folder; its `workflow` is replaced
  std::string faults;   // handed to every gate
};
// Exit status: 0 when C0 and C2 to C8 pass and C1 and C9 wait for a person; else that of the
// gravest verdict that was not expected.
int RunWorkflowDemo(const WorkflowDemo& demo);

}  // namespace tare
