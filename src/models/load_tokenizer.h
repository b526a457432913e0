#pragma once

// The tokenizer and chat template that belong to a checkpoint, from its files or its GGUF metadata.

#include <optional>
#include <string>

#include "base/env.h"
#include "models/chat_template.h"
#include "models/tokenizer.h"
#include "tensor/checkpoint.h"

namespace tare::models {

// kNotFound when the checkpoint has no tokenizer: token IDs are then the only way in.
Result<Tokenizer> LoadTokenizer(Env* env, const Checkpoint& checkpoint);
// The template's text; empty when the checkpoint has none.
Result<std::string> LoadChatTemplate(Env* env, const Checkpoint& checkpoint);

}  // namespace tare::models
