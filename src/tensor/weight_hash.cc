#include "tensor/weight_hash.h"

#include <algorithm>
#include <mutex>

#include "base/json.h"
#include "tensor/digest_many.h"

namespace tare {

Result<Sha256Digest> HashOfItems(std::vector<WeightHashItem> items) {
  std::sort(items.begin(), items.end(),
            [](const WeightHashItem& a, const WeightHashItem& b) { return a.name < b.name; });
  Sha256 hash;
  hash.Update("tare.weights/1\n");
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && items[i].name == items[i - 1].name) {
      return InvalidArgument("tensor \"{}\" twice in a weight hash", Printable(items[i].name));
    }
    Json line = Json::object();
    line["digest"] = Hex(items[i].digest);
    line["dtype"] = std::string(DTypeName(items[i].dtype));
    line["name"] = items[i].name;
    line["shape"] = items[i].shape;
    TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(line));
    hash.Update(text);
    hash.Update("\n");
  }
  return hash.Finish();
}

Result<Sha256Digest> HashOfTensors(std::span<const std::pair<std::string, Tensor>> tensors,
                                   ThreadPool* pool) {
  std::vector<Tensor> views;
  views.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) views.push_back(tensor);
  const std::vector<Sha256Digest> digests = TensorDigests(views, pool);
  std::vector<WeightHashItem> items;
  items.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    items.push_back({.name = tensors[i].first,
                     .dtype = views[i].dtype(),
                     .shape = views[i].shape(),
                     .digest = digests[i],
                     .plain_sha256 = std::nullopt});
  }
  return HashOfItems(std::move(items));
}

Result<WeightHash> HashWeights(const Checkpoint& checkpoint, ThreadPool* pool, bool plain_sha256) {
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, checkpoint.CanonicalNames());
  WeightHash out;
  out.tensors.resize(names.size());
  std::mutex mutex;
  Status first_error;
  // One tensor a piece, so that a GGUF file is dequantised in parallel and freed at once.
  const auto one = [&](int64_t i) {
    WeightHashItem& item = out.tensors[static_cast<size_t>(i)];
    item.name = names[static_cast<size_t>(i)];
    const auto tensor = checkpoint.Get(item.name);
    if (!tensor.ok()) {
      const std::lock_guard<std::mutex> hold(mutex);
      if (first_error.ok()) first_error = tensor.status();
      return;
    }
    item.dtype = tensor->dtype();
    item.shape = tensor->shape();
    item.digest = TensorDigest(*tensor);
    if (plain_sha256) {
      item.plain_sha256 = Sha256Of(tensor->data(), static_cast<size_t>(tensor->size_bytes()));
    }
  };
  if (pool == nullptr) {
    for (int64_t i = 0; i < static_cast<int64_t>(names.size()); ++i) one(i);
  } else {
    pool->ParallelFor(static_cast<int64_t>(names.size()), one);
  }
  TARE_RETURN_IF_ERROR(first_error);
  for (const WeightHashItem& item : out.tensors) {
    out.total_bytes += ElementCount(item.shape).value() * SizeOf(item.dtype);
  }
  TARE_ASSIGN_OR_RETURN(out.digest, HashOfItems(out.tensors));
  return out;
}

}  // namespace tare
