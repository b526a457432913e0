#pragma once

// What the judge of C2 and its collector share: the features of a stack of layers, and the smallest
// set of layers that keeps them.

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace tare::workflow {

struct LayerShape {
  std::vector<std::string> types;   // operator types in it: "attention.full", "moe", ...
  std::vector<std::string> states;  // state paths through it: "kv", "kv.window", "ssm", "conv"
  std::vector<std::string> shares;  // layers before it whose state it reads, by kind: "kv.shared"
};

// "type:attention.full", "pair:moe>attention.full" (every type of a layer against every type of the
// next one), "state:kv", "share:kv.shared". The first and last layer's seams to embedding and head
// are pairs too: "pair:embedding>...", "pair:...>head".
std::set<std::string> FeaturesOf(const std::vector<LayerShape>& layers);

// Indices, ascending, of a smallest run of layers (in their order) that keeps every feature of
// `layers`; at least `min_layers`, as far as there are that many. The result is the smallest of
// those that a greedy choice of whole stretches finds: exact up to 12 layers, else not proven
// minimal.
std::vector<size_t> ChooseLayers(const std::vector<LayerShape>& layers, size_t min_layers = 1);

}  // namespace tare::workflow
