#include "models/pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/dispatch/dispatch.h"

namespace tare::models {

Result<Tensor> ToDevice(const void* data, DType dtype, Shape shape, Device device) {
  TARE_ASSIGN_OR_RETURN(Tensor host, Tensor::Allocate(dtype, std::move(shape)));
  if (host.size_bytes() > 0) std::memcpy(host.mutable_data(), data, host.size_bytes());
  return host.To(device);
}

Status SetZero(Tensor* t) {
  if (t->device() == Device::kCpu) {
    if (t->size_bytes() > 0) std::memset(t->mutable_data(), 0, t->size_bytes());
    return Ok();
  }
  // Device memory is handed out zero-filled.
  TARE_ASSIGN_OR_RETURN(*t, Tensor::Allocate(t->dtype(), t->shape(), t->device()));
  return Ok();
}

Status GatherRows(const ops::Ctx& ctx, const Tensor& x, std::span<const int64_t> rows,
                  Tensor* out) {
  const int64_t bytes = x.dim(1) * SizeOf(x.dtype());
  if (ctx.device == Device::kCpu) {
    const char* from = static_cast<const char*>(x.data());
    char* to = static_cast<char*>(out->mutable_data());
    for (size_t i = 0; i < rows.size(); ++i)
      std::memcpy(to + static_cast<int64_t>(i) * bytes, from + rows[i] * bytes, bytes);
    return Ok();
  }
  const std::vector<int32_t> token(rows.begin(), rows.end());
  TARE_ASSIGN_OR_RETURN(
      const Tensor index,
      ToDevice(token.data(), DType::kI32, {static_cast<int64_t>(token.size())}, ctx.device));
  const ops::dispatch::Params params{
      .hidden = x.dim(1), .top_k = 1, .dtype = x.dtype(), .grad_dtype = x.dtype()};
  ops::dispatch::Args args;
  args.rows = x.dim(0);
  args.out_rows = static_cast<int64_t>(rows.size());
  args.row_token = static_cast<const int32_t*>(index.data());
  args.x = x.data();
  args.out = out->mutable_data();
  return ops::dispatch::Forward(ctx, params, args);
}

Status ScatterRows(const ops::Ctx& ctx, const Tensor& x, std::span<const int64_t> rows,
                   Tensor* out) {
  const int64_t bytes = x.dim(1) * SizeOf(x.dtype());
  if (ctx.device == Device::kCpu) {
    TARE_RETURN_IF_ERROR(SetZero(out));
    const char* from = static_cast<const char*>(x.data());
    char* to = static_cast<char*>(out->mutable_data());
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] >= 0)
        std::memcpy(to + rows[i] * bytes, from + static_cast<int64_t>(i) * bytes, bytes);
    }
    return Ok();
  }
  std::vector<int32_t> slot(out->dim(0), -1);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= 0) slot[rows[i]] = static_cast<int32_t>(i);
  }
  TARE_ASSIGN_OR_RETURN(const Tensor index,
                        ToDevice(slot.data(), DType::kI32, {out->dim(0), 1}, ctx.device));
  const ops::dispatch::Params params{
      .hidden = x.dim(1), .top_k = 1, .dtype = x.dtype(), .grad_dtype = x.dtype()};
  ops::dispatch::BackwardArgs args;
  args.rows = out->dim(0);
  args.out_rows = x.dim(0);
  args.slot_row = static_cast<const int32_t*>(index.data());
  args.dout = x.data();
  args.dx = out->mutable_data();
  return ops::dispatch::Backward(ctx, params, args);
}

Result<Prepared> Prepare(const Model& model, const Batch& batch) {
  const ModelConfig& c = model.config();
  Prepared p;
  TARE_ASSIGN_OR_RETURN(p.layout, LayOut(batch));
  const int64_t rows = p.layout.rows;
  std::vector<int32_t> ids(rows, 0), positions(rows, 0);
  std::vector<uint8_t> valid(rows, 0);
  if (batch.cache != nullptr &&
      (batch.block_rows < 0 || batch.max_pages < 0 ||
       static_cast<int64_t>(batch.block_table.size()) != batch.block_rows * batch.max_pages)) {
    return InvalidArgument("the block table has {} entries for [{}, {}]", batch.block_table.size(),
                           batch.block_rows, batch.max_pages);
  }
  int64_t real = 0;
  for (size_t r = 0; r < batch.runs.size(); ++r) {
    const TokenRun& run = batch.runs[r];
    const int64_t n = static_cast<int64_t>(run.tokens.size()), begin = p.layout.row_of_run[r];
    if (run.position > model.max_positions() - n) {
      return InvalidArgument("run {} reaches position {}; the rope tables end at {}", r,
                             run.position + n, model.max_positions());
    }
    if (!(run.temperature > 0.0f) || !std::isfinite(run.temperature)) {
      return InvalidArgument("run {} has temperature {}; a finite one above 0 is expected", r,
                             run.temperature);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int32_t id = run.tokens[i];
      if (id < 0 || id >= c.vocab)
        return InvalidArgument("run {} token {} is {}; the vocabulary has {}", r, i, id, c.vocab);
      if (!run.targets.empty() && (run.targets[i] < -1 || run.targets[i] >= c.vocab)) {
        return InvalidArgument("run {} target {} is {}; -1 to {} is possible", r, i, run.targets[i],
                               c.vocab - 1);
      }
      ids[begin + i] = id;
      positions[begin + i] = static_cast<int32_t>(run.position + i);
      valid[begin + i] = 1;
    }
    real += n;
    ops::attention::Run a;
    a.q_begin = begin;
    a.q_rows = n;
    a.position = run.position;
    p.max_keys = std::max(p.max_keys, run.position + n);
    if (batch.cache == nullptr) {
      if (run.position != 0) {
        return InvalidArgument(
            "run {} starts at position {} without a cache; its keys would be missing", r,
            run.position);
      }
      a.kv_begin = begin;
    } else {
      a.block_row = run.block_row;
      const int64_t page_size = batch.cache->page_size();
      const int64_t pages = (run.position + n + page_size - 1) / page_size;
      if (run.block_row < 0 || run.block_row >= batch.block_rows || pages > batch.max_pages) {
        return InvalidArgument("run {} needs {} pages of row {}; the block table is [{}, {}]", r,
                               pages, run.block_row, batch.block_rows, batch.max_pages);
      }
      for (int64_t i = 0; i < pages; ++i) {
        const int32_t page = batch.block_table[run.block_row * batch.max_pages + i];
        if (page < 0 || page >= batch.cache->num_pages()) {
          return InvalidArgument("run {} block {} is page {}; the cache has {}", r, i, page,
                                 batch.cache->num_pages());
        }
      }
    }
    p.runs.push_back(a);
  }
  p.padded = real != rows;
  const Device device = model.device();
  TARE_ASSIGN_OR_RETURN(p.ids, ToDevice(ids.data(), DType::kI32, {rows}, device));
  TARE_ASSIGN_OR_RETURN(p.positions, ToDevice(positions.data(), DType::kI32, {rows}, device));
  TARE_ASSIGN_OR_RETURN(p.valid, ToDevice(valid.data(), DType::kU8, {rows}, device));
  if (batch.cache != nullptr) {
    TARE_ASSIGN_OR_RETURN(p.block_table, ToDevice(batch.block_table.data(), DType::kI32,
                                                  {batch.block_rows, batch.max_pages}, device));
  }
  return p;
}

Reporter::Reporter(Tap* tap, const Model& model, const Batch& batch, const Prepared& prepared,
                   fault::Side side)
    : tap_(tap), model_(model), batch_(batch), side_(side) {
  if (tap_ == nullptr) return;
  TapFrame frame;
  frame.phase = batch.phase;
  frame.side = side;
  frame.weight_version = batch.weight_version;
  frame.step = batch.step;
  for (size_t r = 0; r < batch.runs.size(); ++r) {
    const TokenRun& run = batch.runs[r];
    frame.runs.push_back({run.name, run.history, run.position, prepared.layout.row_of_run[r],
                          std::vector<int32_t>(run.tokens.begin(), run.tokens.end())});
  }
  tap_->BeginFrame(frame);
  open_ = true;
}

Reporter::~Reporter() { Close(); }

void Reporter::Close() {
  if (open_) tap_->EndFrame();
  open_ = false;
}

std::string Reporter::Name(int layer, const std::string& name) const {
  return layer < 0 ? name : "layers." + std::to_string(layer) + "." + name;
}

void Reporter::Emit(int layer, const std::string& name, const char* op, const Tensor& value,
                    std::vector<std::string> inputs, TapRole role, bool reads_history) {
  if (tap_ == nullptr) return;
  TapPoint point;
  point.name = Name(layer, name);
  point.layer = layer;
  point.op = op;
  point.role = role;
  point.inputs = std::move(inputs);
  point.reads_history = reads_history;
  if (value.device() == Device::kCpu) {
    tap_->Emit(point, value);
    return;
  }
  auto host = value.To(Device::kCpu);
  TARE_CHECK(host.ok()) << host.status().ToString();
  tap_->Emit(point, *host);
}

void Reporter::EmitColumns(int layer, const std::string& name, const char* op, const Tensor& value,
                           int64_t begin, int64_t width, std::vector<std::string> inputs) {
  if (tap_ == nullptr) return;
  auto host = value.To(Device::kCpu);
  TARE_CHECK(host.ok()) << host.status().ToString();
  auto columns = Tensor::Allocate(value.dtype(), {value.dim(0), width});
  TARE_CHECK(columns.ok()) << columns.status().ToString();
  const int64_t item = SizeOf(value.dtype()), stride = value.dim(1) * item;
  const char* from = static_cast<const char*>(host->data()) + begin * item;
  char* to = static_cast<char*>(columns->mutable_data());
  for (int64_t t = 0; t < value.dim(0); ++t)
    std::memcpy(to + t * width * item, from + t * stride, width * item);
  Emit(layer, name, op, *columns, std::move(inputs));
}

void Reporter::EmitSlots(int layer, const std::string& name, const char* op, const Tensor& routed,
                         const ops::dispatch::Plan& plan, std::vector<std::string> inputs) {
  if (tap_ == nullptr) return;
  auto host = routed.To(Device::kCpu);
  TARE_CHECK(host.ok()) << host.status().ToString();
  const int64_t bytes = routed.dim(1) * SizeOf(routed.dtype());
  const int64_t top_k = model_.config().top_k;
  const int64_t tokens = static_cast<int64_t>(plan.slot_row.size()) / top_k;
  auto slots = Tensor::Allocate(routed.dtype(), {tokens, top_k * routed.dim(1)});
  TARE_CHECK(slots.ok()) << slots.status().ToString();
  for (size_t i = 0; i < plan.slot_row.size(); ++i) {
    if (plan.slot_row[i] < 0) continue;
    std::memcpy(static_cast<char*>(slots->mutable_data()) + static_cast<int64_t>(i) * bytes,
                static_cast<const char*>(host->data()) + plan.slot_row[i] * bytes, bytes);
  }
  Emit(layer, name, op, *slots, std::move(inputs));
}

// The embedding rows are what the tokens alone determine: copied again from the table they must
// equal what the frame holds, else the frame is stale.
void Reporter::EmitEmbedding(const Model& model, const Prepared& prepared, const Tensor& out) {
  if (tap_ == nullptr) return;
  Emit(-1, "embed.out", "embedding", out, {}, TapRole::kSentinel);
  auto table = model.parameters()[model.embedding()].value.To(Device::kCpu);
  auto ids = prepared.ids.To(Device::kCpu);
  auto expected = Tensor::Allocate(out.dtype(), out.shape());
  TARE_CHECK(table.ok() && ids.ok() && expected.ok());
  const int64_t bytes = out.dim(1) * SizeOf(out.dtype());
  for (int64_t t = 0; t < out.dim(0); ++t) {
    std::memcpy(static_cast<char*>(expected->mutable_data()) + t * bytes,
                static_cast<const char*>(table->data()) + ids->as<int32_t>()[t] * bytes, bytes);
  }
  Emit(-1, "embed.out", "embedding", *expected, {}, TapRole::kExpected);
}

void Reporter::EndWithLogprobs(std::span<const float> logprob, std::span<const float> entropy) {
  if (tap_ == nullptr) return;
  Close();
  if (logprob.empty()) return;
  // A logprob belongs to its target: rows are targets, one run for each stretch of consecutive
  // ones.
  TapFrame frame;
  frame.phase = batch_.phase;
  frame.side = side_;
  frame.weight_version = batch_.weight_version;
  frame.step = batch_.step;
  int64_t row = 0;
  for (const TokenRun& run : batch_.runs) {
    TokenHash history = run.history;
    bool continues = false;
    for (size_t i = 0; i < run.targets.size(); ++i) {
      history = ExtendTokenHash(history, run.tokens.subspan(i, 1));
      if (run.targets[i] < 0) {
        continues = false;
        continue;
      }
      // A stretch goes on only where the targets are the sequence's own next tokens.
      if (!continues) {
        frame.runs.push_back(
            {run.name, history, run.position + static_cast<int64_t>(i) + 1, row, {}});
      }
      frame.runs.back().tokens.push_back(run.targets[i]);
      continues = i + 1 < run.tokens.size() && run.tokens[i + 1] == run.targets[i];
      ++row;
    }
  }
  tap_->BeginFrame(frame);
  const auto emit = [&](const char* name, std::span<const float> values) {
    auto t =
        ToDevice(values.data(), DType::kF32, {static_cast<int64_t>(values.size())}, Device::kCpu);
    TARE_CHECK(t.ok()) << t.status().ToString();
    TapPoint point;
    point.name = name;
    point.op = "logprob";
    tap_->Emit(point, *t);
  };
  emit("logprob", logprob);
  if (!entropy.empty()) emit("entropy", entropy);
  tap_->EndFrame();
}

}  // namespace tare::models
