#include "models/audit.h"

#include <chrono>
#include <cstring>

#include "models/forward.h"
#include "numerics/philox.h"
#include "tensor/convert.h"

namespace tare::models {
namespace {

struct Recorded {
  std::string name, op;
  Tensor value;
};

// Keeps a copy of everything that is emitted, in order.
class KeepTap : public Tap {
 public:
  void BeginFrame(const TapFrame& frame) override {
    prefix_ = std::string(TapPhaseName(frame.phase)) + ":";
  }
  void Emit(const TapPoint& point, const Tensor& value) override {
    if (point.role == TapRole::kExpected || !status_.ok()) return;
    auto copy = value.Clone();
    if (!copy.ok()) {
      status_ = copy.status();
      return;
    }
    records_.push_back({prefix_ + point.name, point.op, *std::move(copy)});
  }
  void EndFrame() override {}
  const Status& status() const { return status_; }
  std::vector<Recorded>& records() { return records_; }

 private:
  std::string prefix_;
  std::vector<Recorded> records_;
  Status status_;
};

struct Run {
  std::vector<Recorded> forward, backward, gradients;
  double seconds = 0;
};

Result<Run> RunOn(ThreadPool* pool, Device device,
                  const std::function<Result<Model>(const ModelOptions&)>& make,
                  const std::vector<std::vector<int32_t>>& sequences, const AuditOptions& options) {
  const fault::Side side = device == Device::kCpu ? options.cpu_side : options.device_side;
  ModelOptions load;
  load.device = device;
  load.pack = device == Device::kCpu;
  load.side = side;
  int64_t longest = 1;
  for (const auto& s : sequences) longest = std::max(longest, static_cast<int64_t>(s.size()));
  load.max_positions = longest;
  TARE_ASSIGN_OR_RETURN(const Model model, make(load));
  std::vector<std::vector<int32_t>> targets;
  Batch batch;
  batch.row_align = options.row_align;
  batch.entropy = true;
  for (const auto& s : sequences) {
    targets.emplace_back(s.begin() + 1, s.end());
    targets.back().push_back(-1);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    TokenRun run;
    run.tokens = sequences[i];
    run.targets = targets[i];
    run.name = std::to_string(i);
    batch.runs.push_back(run);
  }
  ops::Ctx ctx;
  ctx.pool = pool;
  ctx.profile = options.profile;
  ctx.device = device;
  ctx.side = side;
  Run run;
  Scratch scratch;
  Tape tape;
  KeepTap forward, backward;
  const auto begin = std::chrono::steady_clock::now();
  TARE_ASSIGN_OR_RETURN(
      const ForwardOutput out,
      Forward(ctx, model, batch, &scratch, options.backward ? &tape : nullptr, &forward));
  TARE_RETURN_IF_ERROR(forward.status());
  run.forward = std::move(forward.records());
  if (options.backward) {
    TARE_ASSIGN_OR_RETURN(Gradients gradients, Gradients::Zeros(model));
    // Any gradient of the loss will do, as long as both sides read the same: signs and sizes vary.
    std::vector<float> dlogprob, dentropy;
    for (size_t i = 0; i < out.logprob.size(); ++i) {
      const auto word =
          numerics::RandomAt(17, static_cast<uint32_t>(i), numerics::RandomPurpose::kTest, 0);
      dlogprob.push_back((static_cast<float>(word.v[0] >> 8) * 0x1p-24f - 0.5f) * 0.125f);
      dentropy.push_back((static_cast<float>(word.v[1] >> 8) * 0x1p-24f - 0.5f) * 0x1p-6f);
    }
    TARE_RETURN_IF_ERROR(Backward(ctx, model, batch, {dlogprob, dentropy}, &tape, &scratch,
                                  &gradients, 0, &backward));
    TARE_RETURN_IF_ERROR(FinishGradients(ctx, model, &gradients));
    TARE_RETURN_IF_ERROR(backward.status());
    run.backward = std::move(backward.records());
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      TARE_ASSIGN_OR_RETURN(Tensor host, gradients.of(static_cast<int>(i)).To(Device::kCpu));
      if (device == Device::kCpu) {
        TARE_ASSIGN_OR_RETURN(host, host.Clone());
      }
      run.gradients.push_back({model.parameters()[i].name + ".grad", "gradient", std::move(host)});
    }
  }
  run.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return run;
}

Status Compare(const std::vector<Recorded>& cpu, const std::vector<Recorded>& device,
               AuditCount* count, AuditReport* report) {
  if (cpu.size() != device.size()) {
    return Error(Code::kInternal, "{} tensors on the CPU, {} on the device", cpu.size(),
                 device.size());
  }
  for (size_t i = 0; i < cpu.size(); ++i) {
    const Recorded &a = cpu[i], &b = device[i];
    if (a.name != b.name || a.value.shape() != b.value.shape() ||
        a.value.dtype() != b.value.dtype()) {
      return Error(Code::kInternal, "tensor {} is {} {} on the CPU and {} {} on the device", i,
                   a.name, ShapeToString(a.value.shape()), b.name, ShapeToString(b.value.shape()));
    }
    AuditCount& op = report->by_op[a.op];
    for (AuditCount* c : {count, &op}) {
      ++c->tensors;
      c->elements += a.value.elements();
    }
    const auto size = static_cast<size_t>(SizeOf(a.value.dtype()));
    const auto* x = static_cast<const uint8_t*>(a.value.data());
    const auto* y = static_cast<const uint8_t*>(b.value.data());
    if (a.value.size_bytes() == 0 ||
        std::memcmp(x, y, static_cast<size_t>(a.value.size_bytes())) == 0)
      continue;
    AuditDifference d{a.name, a.op, a.value.shape(), -1, 0, 0, 0};
    for (int64_t e = 0; e < a.value.elements(); ++e) {
      const size_t at = static_cast<size_t>(e) * size;
      if (std::memcmp(x + at, y + at, size) == 0) continue;
      if (d.differing++ == 0) {
        d.element = e;
        std::memcpy(&d.cpu_bits, x + at, size);
        std::memcpy(&d.device_bits, y + at, size);
      }
    }
    count->differing += d.differing;
    op.differing += d.differing;
    report->differences.push_back(std::move(d));
  }
  return Ok();
}

}  // namespace

Result<AuditReport> Audit(ThreadPool* pool,
                          const std::function<Result<Model>(const ModelOptions&)>& make,
                          const std::vector<std::vector<int32_t>>& sequences,
                          const AuditOptions& options) {
  if (sequences.empty()) return InvalidArgument("an audit of no sequence");
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].size() < 2)
      return InvalidArgument("sequence {} has {} tokens; at least 2", i, sequences[i].size());
  }
  TARE_ASSIGN_OR_RETURN(const Run device, RunOn(pool, Device::kCuda, make, sequences, options));
  TARE_ASSIGN_OR_RETURN(const Run cpu, RunOn(pool, Device::kCpu, make, sequences, options));
  AuditReport report;
  report.device_seconds = device.seconds;
  report.cpu_seconds = cpu.seconds;
  TARE_RETURN_IF_ERROR(Compare(cpu.forward, device.forward, &report.forward, &report));
  TARE_RETURN_IF_ERROR(Compare(cpu.backward, device.backward, &report.backward, &report));
  TARE_RETURN_IF_ERROR(Compare(cpu.gradients, device.gradients, &report.gradients, &report));
  return report;
}

ModelConfig Qwen3LayerConfig(int64_t vocab) {
  ModelConfig c;
  c.architecture = "Qwen3ForCausalLM";
  c.vocab = vocab;
  c.hidden = 4096;
  c.intermediate = 12288;
  c.q_heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.max_positions = 40960;
  c.norm_eps = 1e-6f;
  c.qk_norm = true;
  c.rope.head_dim = c.rope.rotary_dim = 128;
  c.rope.theta = 1e6;
  c.layers.resize(1);
  return c;
}

Result<std::vector<std::pair<std::string, Tensor>>> RandomTensors(const ModelConfig& config,
                                                                  uint64_t seed) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& [name, shape] : Model::TensorShapes(config)) {
    TARE_ASSIGN_OR_RETURN(Tensor t, Tensor::Allocate(DType::kBF16, shape));
    const bool norm = shape.size() == 1;
    const double scale = norm ? 0.1 : 1.0 / __builtin_sqrt(static_cast<double>(shape.back()));
    auto* out = t.mutable_as<uint16_t>();
    const uint64_t key = seed + 0x9e3779b97f4a7c15u * (tensors.size() + 1);
    for (int64_t i = 0; i < t.elements(); ++i) {
      const auto block =
          numerics::RandomAt(key, static_cast<uint32_t>(i), numerics::RandomPurpose::kInit,
                             static_cast<uint32_t>(i >> 32));
      double sum = -2.0;
      for (const uint32_t v : block.v) sum += static_cast<double>(v) * 0x1p-32;
      const double value = sum * 1.7320508075688772 * scale + (norm ? 1.0 : 0.0);
      out[i] = F32ToBf16(static_cast<float>(value));
    }
    tensors.emplace_back(name, std::move(t));
  }
  return tensors;
}

}  // namespace tare::models
