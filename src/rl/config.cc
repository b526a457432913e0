#include "rl/config.h"

#include <cmath>

namespace tare::rl {
namespace {

// Every field once, in the order of the file.
template <typename Config, typename Visit>
void Fields(Config& c, const Visit& visit) {
  visit("model", c.model);
  visit("task", c.task);
  visit("prompt_tokens", c.prompt_tokens);
  visit("steps", c.steps);
  visit("prompts", c.prompts);
  visit("group", c.group);
  visit("max_tokens", c.max_tokens);
  visit("temperature", c.temperature);
  visit("top_p", c.top_p);
  visit("lr", c.lr);
  visit("lr_schedule", c.lr_schedule);
  visit("warmup_steps", c.warmup_steps);
  visit("min_lr_ratio", c.min_lr_ratio);
  visit("loss", c.loss);
  visit("loss_agg_mode", c.loss_agg_mode);
  visit("clip_ratio_low", c.clip_ratio_low);
  visit("clip_ratio_high", c.clip_ratio_high);
  visit("clip_ratio_c", c.clip_ratio_c);
  visit("norm_adv_by_std", c.norm_adv_by_std);
  visit("filter_groups", c.filter_groups);
  visit("max_num_gen_batches", c.max_num_gen_batches);
  visit("seed", c.seed);
  visit("profile", c.profile);
  visit("arm", c.arm);
  visit("threads", c.threads);
  visit("recompute", c.recompute);
  visit("micro_batch_tokens", c.micro_batch_tokens);
  visit("prefix_caching", c.prefix_caching);
  visit("same_questions", c.same_questions);
  visit("held_out", c.held_out);
  visit("held_out_samples", c.held_out_samples);
  visit("eval_every", c.eval_every);
  visit("keep_weights", c.keep_weights);
  visit("faults", c.faults);
  visit("stop_at_event", c.stop_at_event);
}

}  // namespace

Json LoopConfig::ToJson() const {
  Json json = Json::object();
  Fields(*this, [&](const char* key, const auto& value) { json[key] = value; });
  return json;
}

Result<LoopConfig> LoopConfig::FromJson(const Json& json) {
  LoopConfig c;
  if (!json.is_object())
    return InvalidArgument("configuration of the loop: an object is expected, not {}",
                           json.type_name());
  size_t known = 0;
  Status status = Ok();
  Fields(c, [&](const char* key, auto& value) {
    const auto found = json.find(key);
    if (found == json.end()) return;
    ++known;
    try {
      found->get_to(value);
      // A number of another kind would be converted silently.
      if (Json(value) != *found && status.ok())
        status = InvalidArgument("configuration of the loop: {} is {}", key, found->dump());
    } catch (const nlohmann::json::exception& e) {
      if (status.ok()) status = InvalidArgument("configuration of the loop: {}: {}", key, e.what());
    }
  });
  TARE_RETURN_IF_ERROR(status);
  if (known != json.size()) {
    const Json all = LoopConfig().ToJson();
    for (const auto& [key, value] : json.items()) {
      if (!all.contains(key))
        return InvalidArgument("configuration of the loop: unknown key {}", Printable(key));
    }
  }
  return c;
}

Status ApplyLoss(const std::string& loss, LoopConfig* c) {
  if (loss != "grpo" && loss != "dapo" && loss != "ppo-clip")
    return InvalidArgument("loss is {}; grpo, dapo or ppo-clip", loss);
  c->loss = loss;
  c->loss_agg_mode = loss == "grpo" ? "seq-mean-token-mean" : "token-mean";
  c->clip_ratio_low = 0.2;
  c->clip_ratio_high = loss == "dapo" ? 0.28 : 0.2;
  c->clip_ratio_c = loss == "ppo-clip" ? 3.0 : 0.0;
  c->filter_groups = loss == "dapo";
  c->norm_adv_by_std = true;
  return Ok();
}

Status CheckConfig(const LoopConfig& c) {
  if (c.steps < 1)
    return InvalidArgument("steps is {}; 1 or more (2 for a receipt that can pass)", c.steps);
  if (c.prompts < 1) return InvalidArgument("prompts is {}; 1 or more", c.prompts);
  if (c.prompt_tokens < 1 || c.prompt_tokens > 1 << 20)
    return InvalidArgument("prompt_tokens is {}; 1 to 2^20", c.prompt_tokens);
  if (c.group < 2)
    return InvalidArgument("group is {}; 2 or more, else every advantage is 0", c.group);
  if (c.max_tokens < 1) return InvalidArgument("max_tokens is {}; 1 or more", c.max_tokens);
  if (!(c.temperature > 0) || !std::isfinite(c.temperature)) {
    return InvalidArgument("temperature is {}; above 0 (greedy samples of a group are equal)",
                           c.temperature);
  }
  if (!(c.top_p > 0 && c.top_p <= 1))
    return InvalidArgument("top_p is {}; above 0, at most 1", c.top_p);
  if (!(c.lr >= 0) || !std::isfinite(c.lr)) return InvalidArgument("lr is {}; 0 or above", c.lr);
  if (c.lr_schedule != "constant" && c.lr_schedule != "linear" && c.lr_schedule != "cosine")
    return InvalidArgument("lr_schedule is {}; constant, linear or cosine", c.lr_schedule);
  if (c.warmup_steps < 0 || c.warmup_steps > c.steps)
    return InvalidArgument("warmup_steps is {}; 0 to steps, {}", c.warmup_steps, c.steps);
  if (!(c.min_lr_ratio >= 0 && c.min_lr_ratio <= 1))
    return InvalidArgument("min_lr_ratio is {}; 0 to 1", c.min_lr_ratio);
  LoopConfig named;
  TARE_RETURN_IF_ERROR(ApplyLoss(c.loss, &named));
  if (c.loss_agg_mode != "token-mean" && c.loss_agg_mode != "seq-mean-token-mean") {
    return InvalidArgument("loss_agg_mode is {}; token-mean or seq-mean-token-mean",
                           c.loss_agg_mode);
  }
  if (!(c.clip_ratio_low >= 0 && c.clip_ratio_low < 1))
    return InvalidArgument("clip_ratio_low is {}; 0 to below 1", c.clip_ratio_low);
  if (!(c.clip_ratio_high >= 0) || !std::isfinite(c.clip_ratio_high))
    return InvalidArgument("clip_ratio_high is {}; 0 or above", c.clip_ratio_high);
  if (c.clip_ratio_c != 0 && !(c.clip_ratio_c > 1 && std::isfinite(c.clip_ratio_c)))
    return InvalidArgument("clip_ratio_c is {}; 0 (off) or above 1", c.clip_ratio_c);
  if (c.max_num_gen_batches < 1)
    return InvalidArgument("max_num_gen_batches is {}; 1 or more", c.max_num_gen_batches);
  if (c.arm != "production" && c.arm != "surrogate" && c.arm != "native")
    return InvalidArgument("arm is {}; production, surrogate or native", c.arm);
  if (c.micro_batch_tokens < 1)
    return InvalidArgument("micro_batch_tokens is {}; 1 or more", c.micro_batch_tokens);
  if (c.held_out < 0 || c.eval_every < 0 || c.held_out_samples < 1) {
    return InvalidArgument("held_out is {}, eval_every {}, held_out_samples {}; 0, 0 and 1 or more",
                           c.held_out, c.eval_every, c.held_out_samples);
  }
  return Ok();
}

Json Recipe(const LoopConfig& config) {
  Json recipe = config.ToJson();
  for (const char* key : {"steps", "seed", "held_out", "held_out_samples", "eval_every",
                          "keep_weights", "warmup_steps", "threads", "stop_at_event"})
    recipe.erase(key);
  return recipe;
}

}  // namespace tare::rl
