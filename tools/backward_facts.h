#pragma once

// What `tare backward` finds out for the gates C6 and C7: which backward every launched operator
// has, what each reads, whether the gradient depends on anything that the forward did not save,
// step times, and gradients in three layers against float64 references that share no code with them
// (formulas of its own for operators, trainer/plain_model.h for modules and the model). It judges
// nothing.

#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "models/config.h"
#include "tensor/tensor.h"

namespace tare {

struct BackwardSubject {
  models::ModelConfig config;
  std::vector<std::pair<std::string, Tensor>> tensors;  // Hugging Face names
};
Result<BackwardSubject> LoadBackwardSubject(const std::string& path, int64_t layers);

// One layer of the checkpoint with embedding and head around it.
BackwardSubject OneLayerOf(const BackwardSubject& subject, size_t layer);

// What C7 holds the subject's gradients to, with the reasons: fixed numbers, and for each parameter
// of the bf16 model a share that follows from the float64 reference alone. No gradient of
// production is computed for them.
Result<Json> BackwardTolerances(ThreadPool* pool, const BackwardSubject& subject);

// For C6: {"operators", "poisoned", "absent", "weight_change_raises", "graph", "scan", "times"}.
Result<Json> BackwardInventory(ThreadPool* pool, const BackwardSubject& subject, bool times);
// For C7: {"parameters", "layers", "step", "perturbation", "code"}.
Result<Json> GradientLayers(ThreadPool* pool, const BackwardSubject& subject);

// One compared tensor in the form of C7's evidence.
Json GradientQuantity(const std::string& name, const std::string& tolerance,
                      const std::vector<float>& production, const std::vector<double>& reference);

}  // namespace tare
