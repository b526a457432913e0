#include <vector>

#include "base/check.h"
#include "ops/adamw/adamw.h"
#include "ops/bench.h"

namespace tare::ops::adamw {
namespace {

struct State {
  std::vector<float> master, m, v, grad;
  std::vector<uint16_t> copy;
};

void AddShape(BenchList& list, int64_t count, bool with_copy) {
  const std::string shape = fmt::format("N={}{}", count, with_copy ? " bf16-copy" : "");
  list.Add({"adamw", "step", shape, "copy", count * (with_copy ? 30 : 28), [=](ThreadPool& pool) {
              auto s = std::make_shared<State>();
              s->master.assign(static_cast<size_t>(count), 0.1f);
              s->m.assign(static_cast<size_t>(count), 0.01f);
              s->v.assign(static_cast<size_t>(count), 0.001f);
              s->grad.assign(static_cast<size_t>(count), 0.02f);
              s->copy.assign(static_cast<size_t>(with_copy ? count : 0), 0);
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                Args a;
                a.count = count;
                a.master = s->master.data();
                a.m = s->m.data();
                a.v = s->v.data();
                a.grad = s->grad.data();
                if (with_copy) a.copy = s->copy.data();
                a.lr = 1e-5f;
                a.step = 10;
                const Status status = Step(ctx, {.weight_decay = 0.01f}, a);
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, 16 * count, (with_copy ? 14 : 12) * count, ours, s);
            }});
}

}  // namespace

void AddBenches(BenchList& list) {
  AddShape(list, int64_t{1} << 24, false);
  AddShape(list, int64_t{1} << 24, true);
}

}  // namespace tare::ops::adamw
