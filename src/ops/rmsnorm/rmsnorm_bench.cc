#include <vector>

#include "base/check.h"
#include "ops/bench.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace tare::ops::rmsnorm {
namespace {

struct State {
  std::vector<char> x, residual, w, y, out, dy, dx;
  std::vector<float> rstd, dw;
  std::vector<TokenUnit> units;
};

void AddShape(BenchList& list, int64_t rows, int64_t width, DType dtype) {
  const int64_t bytes = rows * width * SizeOf(dtype);
  const std::string shape = fmt::format("T={} H={} {}", rows, width, DTypeName(dtype));
  Params p;
  p.hidden = width;
  p.dtype = p.weight_dtype = p.residual_dtype = p.grad_dtype = dtype;
  p.add_residual = true;
  const auto state = [rows, width, bytes, dtype] {
    auto s = std::make_shared<State>();
    for (auto* buffer : {&s->x, &s->residual, &s->y, &s->out, &s->dy, &s->dx}) {
      buffer->assign(static_cast<size_t>(bytes), 0x3c);  // bf16 and f32 near 0.0115
    }
    s->w.assign(static_cast<size_t>(width * SizeOf(dtype)), 0x3c);
    s->rstd.assign(static_cast<size_t>(rows), 80.0f);
    s->dw.assign(static_cast<size_t>(width), 0.0f);
    for (int64_t t = 0; t < rows; t += 512)
      s->units.push_back({t, std::min<int64_t>(512, rows - t)});
    return s;
  };
  list.Add({"rmsnorm", "forward+residual", shape, "copy", 4 * bytes, [=](ThreadPool& pool) {
              auto s = state();
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                const Status status = Forward(ctx, p,
                                              {rows, s->x.data(), s->residual.data(), s->w.data(),
                                               s->y.data(), s->out.data(), s->rstd.data()});
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, 2 * bytes, 2 * bytes, ours, s);
            }});
  // The weight's gradient is a second pass over h and dy.
  list.Add({"rmsnorm", "backward", shape, "copy", 5 * bytes, [=](ThreadPool& pool) {
              auto s = state();
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                BackwardArgs a;
                a.rows = rows;
                a.h = s->out.data();
                a.w = s->w.data();
                a.rstd = s->rstd.data();
                a.dy = s->dy.data();
                a.dx = s->dx.data();
                a.dw = s->dw.data();
                a.units = s->units;
                const Status status = Backward(ctx, p, a);
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, 4 * bytes, bytes, ours, s);
            }});
}

}  // namespace

void AddBenches(BenchList& list) {
  for (int64_t width : {576, 1024, 4096}) {
    AddShape(list, 2048, width, DType::kF32);
    AddShape(list, 2048, width, DType::kBF16);
  }
}

}  // namespace tare::ops::rmsnorm
