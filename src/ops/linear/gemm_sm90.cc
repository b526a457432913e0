#include "ops/linear/gemm.h"
namespace tare::ops::gemm {
Schedule RunSm90(ThreadPool& pool, const Problem& problem) { return RunIeee(pool, problem); }
}
