#pragma once

// Batches for tests of the model: the float64 reference of MINI, and one way to run a batch.

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "models/forward.h"
#include "models/mini.h"
#include "tensor/safetensors.h"

namespace tare::models::testing {

struct Context {
  explicit Context(int threads) : pool(threads) { ctx.pool = &pool; }

  ForwardOutput Run(const Model& model, const Batch& batch, Tape* tape = nullptr,
                    Tap* tap = nullptr) {
    auto out = Forward(ctx, model, batch, &scratch, tape, tap);
    TARE_CHECK(out.ok()) << out.status().ToString();
    return *std::move(out);
  }

  ThreadPool pool;
  ops::Ctx ctx;
  Scratch scratch;
};

// tests/data/mini/<variant>_f64.safetensors.
struct Reference {
  explicit Reference(const std::string& variant) : name(variant) {
    auto file =
        SafetensorsFile::Open(Env::Real(), std::string(TARE_SOURCE_DIR) + "/tests/data/mini/" +
                                               variant + "_f64.safetensors");
    TARE_CHECK(file.ok()) << file.status().ToString();
    const auto i32 = [&](const char* key) {
      const Tensor t = *file->Get(key);
      return std::vector<int32_t>(t.as<int32_t>(), t.as<int32_t>() + t.elements());
    };
    const auto f32 = [&](const char* key) {
      const Tensor t = *file->Get(key);
      return std::vector<float>(t.as<float>(), t.as<float>() + t.elements());
    };
    const auto f64 = [&](const char* key) {
      const Tensor t = *file->Get(key);
      return std::vector<double>(t.as<double>(), t.as<double>() + t.elements());
    };
    tokens = i32("tokens"), lengths = i32("lengths"), targets = i32("targets");
    temperature = f32("temperature"), dlogprob = f32("dlogprob"), dentropy = f32("dentropy");
    for (const char* key : {"router_ids.0", "router_ids.1"}) {
      if (file->Find(key) != nullptr) router_ids.push_back(i32(key));
    }
    logprob = f64("logprob"), entropy = f64("entropy"), grad_norm = f64("grad_norm"),
    grad_sample = f64("grad_sample");
  }

  ModelConfig Config(DType dtype) const {
    ModelConfig c = MiniConfig();
    if (name == "tied_bias") {
      c.layers.assign(3, LayerConfig{});
      c.qk_norm = false;
      c.tied = c.qkv_bias = c.o_bias = true;
    }
    c.dtype = c.residual_dtype = c.rope.dtype = dtype;
    return c;
  }
  Model MakeModel(DType dtype) const {
    auto tensors = MiniTensorsFor(Config(dtype));
    TARE_CHECK(tensors.ok()) << tensors.status().ToString();
    ThreadPool pool(1);
    auto model = Model::FromTensors(&pool, Config(dtype), *tensors);
    TARE_CHECK(model.ok()) << model.status().ToString();
    return *std::move(model);
  }
  // The spans point into this object.
  Batch MakeBatch() const {
    Batch batch;
    size_t at = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      TokenRun run;
      run.tokens = std::span(tokens).subspan(at, lengths[s]);
      run.targets = std::span(targets).subspan(at, lengths[s]);
      run.temperature = temperature[s];
      run.name = "s" + std::to_string(s);
      batch.runs.push_back(run);
      at += lengths[s];
    }
    batch.entropy = true;
    return batch;
  }

  std::string name;
  std::vector<int32_t> tokens, lengths, targets;
  std::vector<std::vector<int32_t>> router_ids;  // by MoE layer, [tokens, top_k]
  std::vector<float> temperature, dlogprob, dentropy;
  std::vector<double> logprob, entropy, grad_norm, grad_sample;
};

inline std::vector<uint32_t> Bits(std::span<const float> values) {
  std::vector<uint32_t> out(values.size());
  if (!values.empty()) std::memcpy(out.data(), values.data(), values.size_bytes());
  return out;
}

}  // namespace tare::models::testing
