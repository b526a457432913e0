#include "models/model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "base/env.h"
#include "tensor/checkpoint.h"
#include "tensor/convert.h"
#include "tensor/digest_many.h"
#include "tensor/weight_hash.h"

namespace tare::models {
namespace {

std::string JoinSome(const std::set<std::string>& names) {
  std::string out;
  size_t shown = 0;
  for (const std::string& name : names) {
    if (shown == 4) return out + fmt::format(" and {} more", names.size() - shown);
    out += (shown++ == 0 ? "" : ", ") + name;
  }
  return out;
}

bool IsRotaryBuffer(const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); }

// Rows [row, row + n) of a parameter, under the part's own shape.
Result<Tensor> PartView(const Tensor& value, const ParameterPart& part) {
  TARE_ASSIGN_OR_RETURN(const Tensor rows, value.Slice(part.row, part.row + part.shape[0]));
  return rows.Reshape(part.shape);
}

// The process's mappings of files, shared with them: what their pages hold is in the file too.
class FileMappings {
 public:
  FileMappings() {
    const Result<std::string> maps = Env::Real()->ReadFile("/proc/self/maps");
    std::istringstream lines(maps.ok() ? *maps : "");
    for (std::string line; std::getline(lines, line);) {
      unsigned long begin = 0, end = 0, inode = 0;
      char kind = 0;
      // 7f00-7f40 r--s 00000000 fe:00 1234 /path
      if (std::sscanf(line.c_str(), "%lx-%lx %*c%*c%*c%c %*s %*s %lu", &begin, &end, &kind,
                      &inode) == 4 &&
          kind == 's' && inode != 0) {
        ranges_.emplace_back(begin, end);
      }
    }
  }
  // Bytes that are not read again need not count as this process's memory. The mapping stays, and
  // whoever reads there all the same gets the same bytes from the file. Other memory is left alone.
  void LeaveToTheSystem(std::vector<std::pair<const void*, int64_t>> read) const {
    constexpr uintptr_t kPage = 4096;
    std::sort(read.begin(), read.end());
    for (size_t i = 0; i < read.size();) {
      // One call for all that lie side by side: each interrupts the other threads.
      const auto first = reinterpret_cast<uintptr_t>(read[i].first);
      uintptr_t last = first + static_cast<uintptr_t>(read[i].second);
      for (++i; i < read.size() && reinterpret_cast<uintptr_t>(read[i].first) == last; ++i)
        last += static_cast<uintptr_t>(read[i].second);
      const uintptr_t begin = (first + kPage - 1) / kPage * kPage, end = last / kPage * kPage;
      for (const auto& [from, to] : ranges_) {
        if (end <= begin || begin < from || end > to) continue;
        // The address of a whole page within the tensors. NOLINTNEXTLINE(performance-no-int-to-ptr)
        (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
      }
    }
  }

 private:
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges_;
};

// Tensors of a checkpoint on their way into parameters, converted and, where asked, hashed chunk by
// chunk of the parameter. Some are collected, so that the threads share small ones too, but not
// many, for they may be copies that somebody made to be read once.
class Conversions {
 public:
  Conversions(ThreadPool* pool, bool hash) : pool_(pool), hash_(hash) {}

  // REQUIRES: `to` is on the CPU and has the shape of `from`
  Status Add(const std::string& name, Tensor from, Tensor to) {
    waiting_ += from.size_bytes();
    items_.push_back({name, std::move(from), std::move(to), {}});
    return waiting_ < kMost ? Ok() : Flush();
  }

  Status Flush() {
    if (items_.empty()) return Ok();
    std::vector<DigestChunk> chunks;
    std::vector<const Item*> owner;  // of each chunk
    for (Item& item : items_) {
      AddChunks(item.to.data(), item.to.size_bytes(), &item.digests, &chunks);
      owner.resize(chunks.size(), &item);
    }
    const std::vector<ChunkRun> runs = CutChunks(chunks);
    std::mutex mutex;
    Status failed;
    const auto convert = [&](int64_t run) {
      const auto [begin, end] = runs[static_cast<size_t>(run)];
      for (size_t i = begin; i < end; ++i) {
        Status s = Convert(*owner[i], chunks[i]);
        if (s.ok()) continue;
        const std::lock_guard<std::mutex> hold(mutex);
        if (failed.ok()) failed = std::move(s);
      }
      if (hash_) HashChunks(std::span(chunks).subspan(begin, end - begin));
    };
    if (pool_ == nullptr) {
      for (int64_t i = 0; i < std::ssize(runs); ++i) convert(i);
    } else {
      pool_->ParallelFor(std::ssize(runs), convert);
    }
    std::vector<std::pair<const void*, int64_t>> read;
    for (const Item& item : items_) {
      read.emplace_back(item.from.data(), item.from.size_bytes());
      if (!hash_) continue;
      const Sha256Digest digest = JoinChunkDigests(item.to.dtype(), item.to.shape(), item.digests);
      hashed_.push_back({item.name, item.to.dtype(), item.to.shape(), digest, std::nullopt});
    }
    if (!mappings_) mappings_.emplace();
    mappings_->LeaveToTheSystem(std::move(read));
    items_.clear();
    waiting_ = 0;
    return failed;
  }

  std::vector<WeightHashItem>& hashed() { return hashed_; }

 private:
  static constexpr int64_t kMost = 64 << 20;
  struct Item {
    std::string name;
    Tensor from, to;
    std::vector<Sha256Digest> digests;
  };

  static Status Convert(const Item& item, const DigestChunk& chunk) {
    const DType from = item.from.dtype(), to = item.to.dtype();
    char* target = static_cast<char*>(const_cast<void*>(chunk.data));
    const int64_t begin = (target - static_cast<const char*>(item.to.data())) / SizeOf(to);
    return ConvertElements(static_cast<const char*>(item.from.data()) + begin * SizeOf(from), from,
                           target, to, chunk.size_bytes / SizeOf(to));
  }

  ThreadPool* pool_;
  bool hash_;
  std::optional<FileMappings> mappings_;  // of the first Flush: a model without values needs none
  std::vector<Item> items_;
  std::vector<WeightHashItem> hashed_;
  int64_t waiting_ = 0;  // bytes
};

}  // namespace

void Model::Declare() {
  const ModelConfig& c = config_;
  const auto add = [&](std::string name, ParameterKind kind, int64_t columns,
                       const std::vector<std::pair<std::string, int64_t>>& parts) {
    Parameter p;
    p.name = std::move(name);
    p.kind = kind;
    int64_t rows = 0;
    for (const auto& [part, n] : parts) {
      p.parts.push_back({part, rows, columns == 0 ? Shape{n} : Shape{n, columns}});
      rows += n;
    }
    // The shape is known before there is storage: Build allocates and fills it.
    parameters_.push_back(std::move(p));
    return static_cast<int>(parameters_.size() - 1);
  };
  using Kind = ParameterKind;
  const int64_t h = c.hidden;
  embedding_ = add("embed", Kind::kEmbedding, h, {{"model.embed_tokens.weight", c.vocab}});
  for (size_t l = 0; l < c.layers.size(); ++l) {
    const LayerConfig& layer = c.layers[l];
    LayerParameters ids;
    const std::string own = fmt::format("layers.{}.", l), hf = fmt::format("model.layers.{}.", l);
    const std::string attn = hf + "self_attn.";
    ids.input_norm = add(own + "input_norm", Kind::kNorm, 0, {{hf + "input_layernorm.weight", h}});
    ids.qkv = add(own + "qkv", Kind::kLinear, h,
                  {{attn + "q_proj.weight", c.q_width()},
                   {attn + "k_proj.weight", c.kv_width()},
                   {attn + "v_proj.weight", c.kv_width()}});
    if (c.qkv_bias) {
      ids.qkv_bias = add(own + "qkv_bias", Kind::kBias, 0,
                         {{attn + "q_proj.bias", c.q_width()},
                          {attn + "k_proj.bias", c.kv_width()},
                          {attn + "v_proj.bias", c.kv_width()}});
    }
    if (c.qk_norm) {
      ids.q_norm = add(own + "q_norm", Kind::kNorm, 0, {{attn + "q_norm.weight", c.head_dim}});
      ids.k_norm = add(own + "k_norm", Kind::kNorm, 0, {{attn + "k_norm.weight", c.head_dim}});
    }
    if (layer.sink) ids.sink = add(own + "sink", Kind::kSink, 0, {{attn + "sinks", c.q_heads}});
    ids.o = add(own + "o", Kind::kLinear, c.q_width(), {{attn + "o_proj.weight", h}});
    if (c.o_bias) ids.o_bias = add(own + "o_bias", Kind::kBias, 0, {{attn + "o_proj.bias", h}});
    ids.post_norm =
        add(own + "post_norm", Kind::kNorm, 0, {{hf + "post_attention_layernorm.weight", h}});
    if (layer.moe) {
      const bool mixtral = c.architecture == "MixtralForCausalLM";
      const std::string moe = hf + (mixtral ? "block_sparse_moe." : "mlp.");
      ids.router = add(own + "router", Kind::kLinear, h, {{moe + "gate.weight", c.experts}});
      std::vector<std::pair<std::string, int64_t>> gate_up, down;
      for (int64_t e = 0; e < c.experts; ++e) {
        const std::string expert = moe + fmt::format("experts.{}.", e);
        gate_up.push_back(
            {expert + (mixtral ? "w1.weight" : "gate_proj.weight"), c.expert_intermediate});
        gate_up.push_back(
            {expert + (mixtral ? "w3.weight" : "up_proj.weight"), c.expert_intermediate});
        down.push_back({expert + (mixtral ? "w2.weight" : "down_proj.weight"), h});
      }
      ids.gate_up = add(own + "experts_gate_up", Kind::kLinear, h, gate_up);
      ids.down = add(own + "experts_down", Kind::kLinear, c.expert_intermediate, down);
    } else {
      const std::string mlp = hf + "mlp.";
      ids.gate_up = add(
          own + "gate_up", Kind::kLinear, h,
          {{mlp + "gate_proj.weight", c.intermediate}, {mlp + "up_proj.weight", c.intermediate}});
      ids.down = add(own + "down", Kind::kLinear, c.intermediate, {{mlp + "down_proj.weight", h}});
      if (c.mlp_bias) {
        ids.gate_up_bias =
            add(own + "gate_up_bias", Kind::kBias, 0,
                {{mlp + "gate_proj.bias", c.intermediate}, {mlp + "up_proj.bias", c.intermediate}});
        ids.down_bias = add(own + "down_bias", Kind::kBias, 0, {{mlp + "down_proj.bias", h}});
      }
    }
    layers_.push_back(ids);
  }
  final_norm_ = add("norm", Kind::kNorm, 0, {{"model.norm.weight", h}});
  head_ = c.tied ? embedding_ : add("head", Kind::kLinear, h, {{"lm_head.weight", c.vocab}});
}

Result<Model> Model::Build(ThreadPool* pool, const ModelConfig& config, const ModelOptions& options,
                           const std::vector<std::string>& names,
                           const std::function<Result<Tensor>(const std::string&)>& get,
                           Model* memory, std::vector<WeightHashItem>* items) {
  Model m;
  m.config_ = config;
  m.options_ = options;
  m.max_positions_ = options.max_positions > 0 ? options.max_positions : config.max_positions;
  if (m.max_positions_ > config.max_positions) {
    return InvalidArgument("max_positions {} is beyond the model's {}", m.max_positions_,
                           config.max_positions);
  }
  m.Declare();

  // What is there against what is needed, before anything is read.
  if (get != nullptr) {
    std::set<std::string> missing, left(names.begin(), names.end());
    for (const Parameter& p : m.parameters_) {
      for (const ParameterPart& part : p.parts) {
        if (left.erase(part.name) == 0) missing.insert(part.name);
      }
    }
    std::erase_if(left, IsRotaryBuffer);
    if (config.tied && left.erase("lm_head.weight") != 0) {
      TARE_ASSIGN_OR_RETURN(const Tensor head, get("lm_head.weight"));
      TARE_ASSIGN_OR_RETURN(const Tensor table, get("model.embed_tokens.weight"));
      if (head.dtype() != table.dtype() || head.shape() != table.shape() ||
          std::memcmp(head.data(), table.data(), head.size_bytes()) != 0) {
        return InvalidArgument(
            "lm_head.weight differs from model.embed_tokens.weight, though the configuration ties "
            "them");
      }
    }
    if (!missing.empty()) return InvalidArgument("weights are missing: {}", JoinSome(missing));
    if (!left.empty()) {
      return InvalidArgument("weights that {} does not have: {}", config.architecture,
                             JoinSome(left));
    }
  }

  Conversions conversions(pool, items != nullptr);
  for (size_t i = 0; i < m.parameters_.size(); ++i) {
    Parameter& p = m.parameters_[i];
    int64_t rows = 0;
    for (const ParameterPart& part : p.parts) rows += part.shape[0];
    Shape shape = p.parts[0].shape;
    shape[0] = rows;
    Tensor old;
    if (memory != nullptr && i < memory->parameters_.size())
      old = std::exchange(memory->parameters_[i].value, Tensor());
    if (old.dtype() == config.dtype && old.shape() == shape && old.device() == Device::kCpu) {
      p.value = std::move(old);
    } else {
      TARE_ASSIGN_OR_RETURN(p.value, Tensor::Allocate(config.dtype, shape));
    }
    for (const ParameterPart& part : p.parts) {
      if (get == nullptr) break;
      auto tensor = get(part.name);
      if (!tensor.ok()) return tensor.status().Annotate(part.name);
      if (tensor->shape() != part.shape) {
        return InvalidArgument("{} has shape {}; {} is expected", part.name,
                               ShapeToString(tensor->shape()), ShapeToString(part.shape));
      }
      if (tensor->dtype() != DType::kBF16 && tensor->dtype() != DType::kF32 &&
          tensor->dtype() != DType::kF16) {
        return Unsupported("{} is {}; bf16, f16 and f32 weights are built", part.name,
                           DTypeName(tensor->dtype()));
      }
      TARE_ASSIGN_OR_RETURN(Tensor view, PartView(p.value, part));
      TARE_RETURN_IF_ERROR(conversions.Add(part.name, std::move(*tensor), std::move(view)));
    }
    if (options.device == Device::kCpu) continue;
    TARE_RETURN_IF_ERROR(conversions.Flush());
    TARE_ASSIGN_OR_RETURN(p.value, p.value.To(options.device));
  }
  TARE_RETURN_IF_ERROR(conversions.Flush());
  if (items != nullptr) *items = std::move(conversions.hashed());

  TARE_ASSIGN_OR_RETURN(const ops::rope::Table table,
                        ops::rope::BuildTable(config.rope, m.max_positions_, options.side));
  const auto to_tensor = [&](const std::vector<float>& values, Tensor* out) -> Status {
    const Shape shape = {m.max_positions_, config.rope.rotary_dim / 2};
    TARE_ASSIGN_OR_RETURN(Tensor host, Tensor::Allocate(DType::kF32, shape));
    TARE_CHECK(static_cast<int64_t>(values.size()) == host.elements());
    std::memcpy(host.mutable_data(), values.data(), host.size_bytes());
    TARE_ASSIGN_OR_RETURN(*out, host.To(options.device));
    return Ok();
  };
  TARE_RETURN_IF_ERROR(to_tensor(table.cos, &m.rope_cos_));
  TARE_RETURN_IF_ERROR(to_tensor(table.sin, &m.rope_sin_));
  TARE_RETURN_IF_ERROR(m.Repack(pool));
  return m;
}

Result<Model> Model::Load(ThreadPool* pool, const Checkpoint& checkpoint,
                          const ModelOptions& options, Model* memory,
                          std::vector<WeightHashItem>* items) {
  TARE_ASSIGN_OR_RETURN(ModelConfig config, ParseConfig(checkpoint.config().raw));
  // generation_config.json wins; it often lists more ends than config.json.
  if (!checkpoint.config().eos_token_ids.empty()) {
    config.eos.clear();
    for (int64_t id : checkpoint.config().eos_token_ids) {
      if (id < 0 || id >= config.vocab) {
        return InvalidArgument("eos_token_id {} is outside the vocabulary of {}", id, config.vocab);
      }
      config.eos.push_back(static_cast<int32_t>(id));
    }
  }
  return Build(
      pool, config, options, checkpoint.names(),
      [&](const std::string& name) { return checkpoint.Get(name); }, memory, items);
}

Result<Model> Model::FromTensors(ThreadPool* pool, const ModelConfig& config,
                                 const std::vector<std::pair<std::string, Tensor>>& tensors,
                                 const ModelOptions& options) {
  std::vector<std::string> names;
  std::map<std::string, Tensor> by_name;
  for (const auto& [name, tensor] : tensors) {
    names.push_back(name);
    if (!by_name.emplace(name, tensor).second)
      return InvalidArgument("tensor {} is given twice", name);
  }
  return Build(pool, config, options, names, [&](const std::string& name) -> Result<Tensor> {
    return by_name.at(name).To(Device::kCpu);
  });
}

Result<Model> Model::Zeros(ThreadPool* pool, const ModelConfig& config,
                           const ModelOptions& options) {
  return Build(pool, config, options, {}, nullptr);
}

std::vector<std::pair<std::string, Shape>> Model::TensorShapes(const ModelConfig& config) {
  Model m;
  m.config_ = config;
  m.Declare();
  std::vector<std::pair<std::string, Shape>> out;
  for (const Parameter& p : m.parameters_) {
    for (const ParameterPart& part : p.parts) out.emplace_back(part.name, part.shape);
  }
  std::sort(out.begin(), out.end());
  return out;
}

Result<std::vector<std::pair<std::string, Tensor>>> Model::NamedTensors() const {
  std::vector<std::pair<std::string, Tensor>> out;
  for (const Parameter& p : parameters_) {
    TARE_ASSIGN_OR_RETURN(const Tensor host, p.value.To(Device::kCpu));
    for (const ParameterPart& part : p.parts) {
      TARE_ASSIGN_OR_RETURN(Tensor view, PartView(host, part));
      out.emplace_back(part.name, std::move(view));
    }
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return out;
}

Status Model::Repack(ThreadPool* pool) {
  sinks_.assign(config_.layers.size(), Tensor());
  packed_.resize(parameters_.size());
  for (size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l].sink < 0) continue;
    TARE_ASSIGN_OR_RETURN(const Tensor host, parameters_[layers_[l].sink].value.To(Device::kCpu));
    TARE_ASSIGN_OR_RETURN(const Tensor wide, Convert(host, DType::kF32));
    TARE_ASSIGN_OR_RETURN(sinks_[l], wide.To(options_.device));
  }
  if (options_.device != Device::kCpu || !options_.pack) return Ok();
  const auto pack = [&](int index, int64_t experts) -> Status {
    const Tensor& w = parameters_[index].value;
    const int64_t n = w.dim(0) / experts, k = w.dim(1);
    const bool again = std::ssize(packed_[index]) == experts;
    if (!again) packed_[index].clear();
    for (int64_t e = 0; e < experts; ++e) {
      const char* data = static_cast<const char*>(w.data()) + e * n * k * SizeOf(w.dtype());
      if (again) {
        TARE_RETURN_IF_ERROR(packed_[index][e].Refill(pool, data));
        continue;
      }
      TARE_ASSIGN_OR_RETURN(auto packed,
                            ops::linear::PackedWeight::Pack(pool, data, w.dtype(), n, k));
      packed_[index].push_back(std::move(packed));
    }
    return Ok();
  };
  for (size_t l = 0; l < layers_.size(); ++l) {
    const LayerParameters& ids = layers_[l];
    const int64_t experts = config_.layers[l].moe ? config_.experts : 1;
    TARE_RETURN_IF_ERROR(pack(ids.qkv, 1));
    TARE_RETURN_IF_ERROR(pack(ids.o, 1));
    if (ids.router >= 0) TARE_RETURN_IF_ERROR(pack(ids.router, 1));
    TARE_RETURN_IF_ERROR(pack(ids.gate_up, experts));
    TARE_RETURN_IF_ERROR(pack(ids.down, experts));
  }
  return pack(head_, 1);
}

const ops::linear::PackedWeight* Model::packed(int parameter) const {
  const auto& list = packed_[parameter];
  return list.empty() ? nullptr : &list[0];
}

const std::vector<ops::linear::PackedWeight>& Model::packed_experts(int parameter) const {
  return packed_[parameter];
}

}  // namespace tare::models
