// The generic suite: what every registered operator promises, read from its contract record.
// Meets OPS rows CHEAP-03 (boundaries), CHEAP-06 (repeat), BWD-02 and C6-06 for the operators.

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/sha256.h"
#include "hwy/targets.h"
#include "ops/generic_case.h"
#include "ops/generic_suite.h"
#include "ops/registry.h"
#include "ops/rows.h"
#include "tensor/convert.h"

namespace tare::ops {
namespace {

void ExpectSame(const Operand& o, const Tensor& want, const Tensor& got) {
  ASSERT_EQ(want.shape(), got.shape()) << o.name;
  if (!want.defined() || want.size_bytes() == 0) return;
  const auto* a = static_cast<const uint8_t*>(want.data());
  const auto* b = static_cast<const uint8_t*>(got.data());
  for (int64_t i = 0; i < want.size_bytes(); ++i) {
    if (a[i] == b[i]) continue;
    const int64_t e = i / SizeOf(want.dtype());
    FAIL() << o.name << " " << ShapeToString(want.shape()) << " element " << e << ": want "
           << Get(want, e) << " got " << Get(got, e);
  }
}
void ExpectSameOutputs(const Case& want, const Case& got) {
  for (size_t i = 0; i < want.out.size(); ++i)
    ExpectSame(want.sig.outputs[i], want.out[i], got.out[i]);
}
void ExpectSameGradients(const Case& want, const Case& got) {
  for (size_t i = 0; i < want.din.size(); ++i) {
    if (want.sig.inputs[i].grad) ExpectSame(want.sig.inputs[i], want.din[i], got.din[i]);
  }
}
// Row outputs (and row gradients) of `whole` at `rows` against those of `part`.
void ExpectRows(const Case& whole, const std::vector<int64_t>& rows, const Case& part,
                bool backward) {
  for (size_t i = 0; i < whole.out.size(); ++i) {
    const Operand& o = whole.sig.outputs[i];
    if (o.role == Role::kRows) ExpectSame(o, TakeRows(o, whole.out[i], rows), part.out[i]);
  }
  if (!backward) return;
  for (size_t i = 0; i < whole.din.size(); ++i) {
    const Operand& o = whole.sig.inputs[i];
    if (o.grad && o.role == Role::kRows)
      ExpectSame(o, TakeRows(o, whole.din[i], rows), part.din[i]);
  }
}

void ForEach(const std::function<void(const OpInfo*, const OpKey&)>& body) {
  for (const OpInfo* op : AllOps()) {
    for (const OpKey& key : op->keys) {
      SCOPED_TRACE(op->name + " " + key.ToString());
      body(op, key);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}
void ForEachRowwise(const std::function<void(const OpInfo*, const OpKey&)>& body) {
  ForEach([&](const OpInfo* op, const OpKey& key) {
    if (op->rows_independent) body(op, key);
  });
}

Case Whole(const OpInfo* op, const OpKey& key, int64_t rows = kRows, uint64_t seed = 1) {
  Case c(op, key, rows, seed);
  c.Forward();
  if (op->backward && !testing::Test::HasFatalFailure()) c.Backward();
  return c;
}

TEST(GenericOps, EveryOperatorDescribesItself) {
  EXPECT_FALSE(AllOps().empty());
  for (const OpInfo* op : AllOps()) {
    SCOPED_TRACE(op->name);
    EXPECT_EQ(FindOp(op->name), op);
    ASSERT_FALSE(op->keys.empty());
    for (const OpKey& key : op->keys) {
      const Contract c = op->select(key);
      EXPECT_EQ(c.op, op->name);
      EXPECT_FALSE(c.formula.empty());
      EXPECT_FALSE(c.outputs.empty());
      EXPECT_FALSE(c.invariant_over.empty());
      if (op->backward) {
        EXPECT_FALSE(c.backward.empty()) << "a backward without a formula";
        EXPECT_FALSE(c.gradient_tolerance.reason.empty());
        EXPECT_TRUE(Oracles().contains(op->name)) << "a backward without a float64 oracle";
      }
    }
  }
  EXPECT_EQ(FindOp("no such operator"), nullptr);
}

TEST(GenericOps, ContractIdIsOneForEqualAndAnotherForDifferentRecords) {
  std::map<std::string, std::string> seen;
  ForEach([&](const OpInfo* op, const OpKey& key) {
    const Contract c = op->select(key);
    EXPECT_EQ(Hex(c.Id()), Hex(op->select(key).Id()));
    Contract other = c;
    other.version += 1;
    EXPECT_NE(Hex(c.Id()), Hex(other.Id()));
    other = c;
    other.formula.back() += " ";
    EXPECT_NE(Hex(c.Id()), Hex(other.Id()));
    const auto [at, fresh] = seen.emplace(Hex(c.Id()), c.Canonical());
    EXPECT_TRUE(fresh || at->second == c.Canonical());
  });
}

TEST(GenericOps, RepeatGivesTheSameBits) {
  ForEach([](const OpInfo* op, const OpKey& key) {
    const Case first = Whole(op, key);
    for (int i = 0; i < 2; ++i) {
      const Case again = Whole(op, key);
      ExpectSameOutputs(first, again);
      if (op->backward) ExpectSameGradients(first, again);
    }
  });
}

// Every output and gradient of every operator and key as lines "DIGEST <operator> <key>: <hex>".
std::string Digests(int threads) {
  std::string text;
  ForEach([&](const OpInfo* op, const OpKey& key) {
    Case c(op, key);
    c.threads = threads;
    c.Forward();
    if (op->backward && !testing::Test::HasFatalFailure()) c.Backward();
    Sha256 sha;
    for (const Tensor& t : c.out) sha.Update(t.data(), static_cast<size_t>(t.size_bytes()));
    for (const Tensor& t : c.din) {
      if (t.defined()) sha.Update(t.data(), static_cast<size_t>(t.size_bytes()));
    }
    text += fmt::format("DIGEST {} {}: {}\n", op->name, key.ToString(), Hex(sha.Finish()));
  });
  return text;
}

// What the test below runs in a process of its own.
TEST(GenericOps, DISABLED_PrintDigests) {
  const char* threads = std::getenv("TARE_DIGEST_THREADS");
  std::fputs(Digests(threads == nullptr ? 1 : std::atoi(threads)).c_str(), stdout);
}

// CHEAP-06: fresh processes, each with another heap, address layout and thread count, give the bits
// of this one. In a process of its own no pool, cache or static of an earlier test is left over.
TEST(GenericOps, FreshProcessesGiveTheSameBits) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string here = Digests(1);
  ASSERT_NE(here, "");
  for (const char* environment :
       {"TARE_DIGEST_THREADS=1", "TARE_DIGEST_THREADS=3 MALLOC_PERTURB_=165 MALLOC_ARENA_MAX=1"}) {
    const std::string command = fmt::format(
        "{} '{}' --gtest_also_run_disabled_tests --gtest_filter=GenericOps.DISABLED_PrintDigests "
        "2>/dev/null",
        environment, self);
    FILE* child = popen(command.c_str(), "r");
    ASSERT_NE(child, nullptr);
    std::string lines;
    char line[1024];
    while (std::fgets(line, sizeof(line), child) != nullptr) {
      if (std::string_view(line).starts_with("DIGEST ")) lines += line;
    }
    EXPECT_EQ(pclose(child), 0) << command;
    EXPECT_EQ(lines, here) << command;
  }
}

TEST(GenericOps, ThreadsMoveNoBit) {
  ForEach([](const OpInfo* op, const OpKey& key) {
    const Case one = Whole(op, key, 131);
    for (int threads = 2; threads <= 8; ++threads) {
      Case many(op, key, 131);
      many.threads = threads;
      many.Forward();
      ExpectSameOutputs(one, many);
      if (!op->backward) continue;
      many.Backward();
      ExpectSameGradients(one, many);
    }
  });
}

TEST(GenericOps, OneRowAloneEqualsManyAndPositionInTheBatchIsFree) {
  ForEachRowwise([](const OpInfo* op, const OpKey& key) {
    const Case whole = Whole(op, key);
    for (int64_t row : {int64_t{0}, int64_t{1}, kRows / 2, kRows - 1}) {
      Case alone = whole.Rows({row});
      alone.Forward();
      if (op->backward) alone.Backward();
      ExpectRows(whole, {row}, alone, op->backward != nullptr);
    }
    std::vector<int64_t> turned;
    for (int64_t i = 0; i < kRows; ++i) turned.push_back((i * 5 + 3) % kRows);
    Case rotated = whole.Rows(turned);
    rotated.Forward();
    if (op->backward) rotated.Backward();
    ExpectRows(whole, turned, rotated, op->backward != nullptr);
  });
}

TEST(GenericOps, NeighboursMoveNoBit) {
  ForEachRowwise([](const OpInfo* op, const OpKey& key) {
    const Case whole = Whole(op, key);
    Case other(op, key, kRows, 1000);
    const int64_t victim = 11;
    for (size_t i = 0; i < other.in.size(); ++i) {
      if (other.sig.inputs[i].role == Role::kShared) {
        other.in[i] = whole.in[i];
        continue;
      }
      const int64_t bytes = other.in[i].size_bytes() / kRows;
      std::memcpy(static_cast<char*>(other.in[i].mutable_data()) + victim * bytes,
                  static_cast<const char*>(whole.in[i].data()) + victim * bytes,
                  static_cast<size_t>(bytes));
    }
    for (size_t i = 0; i < other.dout.size(); ++i) {
      if (!other.sig.outputs[i].grad) continue;
      if (other.sig.outputs[i].role == Role::kShared) {
        other.dout[i] = whole.dout[i];
        continue;
      }
      const int64_t bytes = other.dout[i].size_bytes() / kRows;
      std::memcpy(static_cast<char*>(other.dout[i].mutable_data()) + victim * bytes,
                  static_cast<const char*>(whole.dout[i].data()) + victim * bytes,
                  static_cast<size_t>(bytes));
    }
    other.Forward();
    if (op->backward) other.Backward();
    Case cut = other;
    for (size_t i = 0; i < cut.out.size(); ++i)
      cut.out[i] = TakeRows(cut.sig.outputs[i], other.out[i], {victim});
    for (size_t i = 0; i < cut.din.size(); ++i)
      cut.din[i] = TakeRows(cut.sig.inputs[i], other.din[i], {victim});
    ExpectRows(whole, {victim}, cut, op->backward != nullptr);
  });
}

TEST(GenericOps, ChunkCutsMoveNoBit) {
  ForEachRowwise([](const OpInfo* op, const OpKey& key) {
    const Case whole = Whole(op, key);
    for (const auto& cuts :
         {std::vector<int64_t>{0, 1, kRows}, {0, 16, 32, kRows}, {0, 7, 19, kRows - 1, kRows}}) {
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const std::vector<int64_t> rows = Range(cuts[i], cuts[i + 1]);
        Case part = whole.Rows(rows);
        part.Forward();
        if (op->backward) part.Backward();
        ExpectRows(whole, rows, part, op->backward != nullptr);
      }
    }
  });
}

// Sums over tokens: micro-batches cut between units, and padding rows between units, move no bit.
TEST(GenericOps, MicroBatchesAndPaddingMoveNoBitOfASumOverTokens) {
  ForEachRowwise([](const OpInfo* op, const OpKey& key) {
    if (!op->backward) return;
    const Case whole = Whole(op, key);
    Case first = whole.Rows(Range(0, 20));
    Case second = whole.Rows(Range(20, kRows));
    first.Forward();
    first.Backward();
    second.Forward();
    second.din = first.din;
    for (size_t i = 0; i < second.din.size(); ++i) {
      const Operand& o = second.sig.inputs[i];
      if (o.grad && o.role == Role::kRows) second.din[i] = GuardedTensor(o.grad_dtype, o.shape);
    }
    second.Backward(/*fresh=*/false);
    // Three rows of padding, holding another row's data, after each sequence.
    std::vector<int64_t> padded = Range(0, 20);
    for (int64_t pad : {3, 4, 5}) padded.push_back(pad);
    for (int64_t i = 20; i < kRows; ++i) padded.push_back(i);
    padded.push_back(0);
    Case gaps = whole.Rows(padded);
    gaps.units = {{0, 20}, {23, kRows - 20}};
    gaps.Forward();
    gaps.Backward();
    for (size_t i = 0; i < whole.din.size(); ++i) {
      const Operand& o = whole.sig.inputs[i];
      if (!o.grad || o.role != Role::kShared) continue;
      ExpectSame(o, whole.din[i], second.din[i]);
      ExpectSame(o, whole.din[i], gaps.din[i]);
    }
  });
}

// Every SIMD target of this machine against every other.
TEST(GenericOps, SimdTargetsGiveTheSameBits) {
  const int64_t all = hwy::SupportedTargets();
  int tried = 0;
  ForEach([&](const OpInfo* op, const OpKey& key) {
    const Case best = Whole(op, key);
    for (int64_t target = 1; target > 0 && target <= all; target <<= 1) {
      if ((all & target) == 0) continue;
      hwy::SetSupportedTargetsForTest(target);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      const Case one = Whole(op, key);
      ExpectSameOutputs(best, one);
      if (op->backward) ExpectSameGradients(best, one);
      ++tried;
    }
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  });
  EXPECT_GT(tried, 0);
}

TEST(GenericOps, NoRowsIsFine) {
  ForEach([](const OpInfo* op, const OpKey& key) {
    Case c(op, key, 0);
    c.Forward();
    if (op->backward) {
      c.Backward();
      for (size_t i = 0; i < c.din.size(); ++i) {
        if (!c.sig.inputs[i].grad) continue;
        for (int64_t e = 0; e < c.din[i].elements(); ++e) EXPECT_EQ(Get(c.din[i], e), 0.25);
      }
    }
  });
}

bool CanonicalNans(const Tensor& t) {
  for (int64_t i = 0; i < t.elements(); ++i) {
    if (t.dtype() == DType::kF32) {
      const float v = t.as<float>()[i];
      if (v != v && std::bit_cast<uint32_t>(v) != 0x7fffffffu) return false;
    }
    if (t.dtype() == DType::kBF16 || t.dtype() == DType::kF16) {
      const uint16_t v = t.as<uint16_t>()[i];
      if ((v & 0x7fff) > (t.dtype() == DType::kBF16 ? 0x7f80 : 0x7c00) && v != 0x7fff) return false;
    }
  }
  return true;
}

TEST(GenericOps, NonFiniteValuesStayInTheirRowAndNansAreCanonical) {
  ForEachRowwise([](const OpInfo* op, const OpKey& key) {
    const Case whole = Whole(op, key);
    const int64_t victim = 6;
    std::vector<int64_t> others;
    for (int64_t i = 0; i < kRows; ++i) {
      if (i != victim) others.push_back(i);
    }
    for (size_t input = 0; input < whole.in.size(); ++input) {
      const Operand& o = whole.sig.inputs[input];
      if (o.role != Role::kRows || !IsFloat(o.dtype) || o.shape[0] == 0) continue;
      for (const double value :
           {std::nan(""), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
        Case bad = whole.Rows(Range(0, kRows));
        bad.units = whole.units;
        const int64_t width = bad.in[input].elements() / kRows;
        Put(bad.in[input], victim * width + width / 2, value);
        if (value != value && o.dtype == DType::kF32) {
          bad.in[input].mutable_as<uint32_t>()[victim * width + width / 2] = 0xffc0beefu;
        }
        const Status status = bad.TryForward();
        if (!status.ok()) {
          EXPECT_TRUE(o.finite || !op->propagates_non_finite) << status.ToString();
          EXPECT_THAT(status.message(), testing::HasSubstr(std::to_string(victim)));
          continue;
        }
        if (op->backward) bad.Backward();
        for (const Tensor& t : bad.out) EXPECT_TRUE(CanonicalNans(t)) << o.name;
        Case rest = bad;
        for (size_t i = 0; i < rest.out.size(); ++i)
          rest.out[i] = TakeRows(bad.sig.outputs[i], bad.out[i], others);
        for (size_t i = 0; i < rest.din.size(); ++i) {
          EXPECT_TRUE(!bad.sig.inputs[i].grad || CanonicalNans(bad.din[i]))
              << bad.sig.inputs[i].name;
          rest.din[i] = TakeRows(bad.sig.inputs[i], bad.din[i], others);
        }
        ExpectRows(whole, others, rest, op->backward != nullptr);
      }
    }
  });
}

Values ToValues(const std::vector<Tensor>& tensors) {
  Values values;
  for (const Tensor& t : tensors) {
    values.emplace_back();
    for (int64_t i = 0; i < t.elements(); ++i) values.back().push_back(Get(t, i));
  }
  return values;
}
Values EmptyOutputs(const Signature& sig) {
  Values out;
  for (const Operand& o : sig.outputs) {
    out.emplace_back(static_cast<size_t>(ElementCount(o.shape).value()), 0.0);
  }
  return out;
}

// |got - want| <= 2^absolute + 2^relative * (largest |want| of the row or tensor).
void ExpectNear(const Operand& o, const std::vector<double>& want, const Tensor& got,
                const Tolerance& tolerance) {
  const int64_t rows = o.role == Role::kRows && !o.shape.empty() ? o.shape[0] : 1;
  const int64_t width = rows == 0 ? 0 : got.elements() / rows;
  for (int64_t r = 0; r < rows; ++r) {
    double scale = 0;
    for (int64_t i = 0; i < width; ++i)
      scale = std::max(scale, std::abs(want[static_cast<size_t>(r * width + i)]));
    const double limit =
        std::ldexp(1.0, tolerance.absolute_log2) + std::ldexp(scale, tolerance.relative_log2);
    for (int64_t i = 0; i < width; ++i) {
      const double w = want[static_cast<size_t>(r * width + i)];
      ASSERT_LE(std::abs(Get(got, r * width + i) - w), limit)
          << o.name << " row " << r << " element " << i << ": oracle " << w << " got "
          << Get(got, r * width + i) << " (contract: " << tolerance.reason << ")";
    }
  }
}

void CheckForwardAgainstOracle(const OpInfo* op, const OpKey& key, int64_t rows, uint64_t seed) {
  const auto oracle = Oracles().find(op->name);
  if (oracle == Oracles().end()) return;
  Case c(op, key, rows, seed);
  c.Forward();
  Values want = EmptyOutputs(c.sig);
  oracle->second(key, rows, ToValues(c.in), want);
  for (size_t i = 0; i < c.out.size(); ++i) {
    if (!c.sig.outputs[i].saved)
      ExpectNear(c.sig.outputs[i], want[i], c.out[i], op->select(key).forward_tolerance);
  }
}

TEST(GenericOps, ForwardIsNearTheFloat64Oracle) {
  ForEach([](const OpInfo* op, const OpKey& key) { CheckForwardAgainstOracle(op, key, kRows, 7); });
}

// Widths on both sides of every constant of the contract, and of the vector lengths.
TEST(GenericOps, BoundariesOfTheContractsConstants) {
  ForEach([](const OpInfo* op, const OpKey& key) {
    if (op->width_dim.empty()) return;
    const Contract c = op->select(key);
    std::vector<int64_t> widths = {1, 2, 7, 8, 9, 15, 16, 17};
    for (int64_t b : {c.lanes, c.block, c.leaves, c.lanes * 2, c.block * c.leaves}) {
      for (int64_t w : {b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1}) {
        if (w > 0 && w < 2500) widths.push_back(w);
      }
    }
    std::sort(widths.begin(), widths.end());
    widths.erase(std::unique(widths.begin(), widths.end()), widths.end());
    for (int64_t width : widths) {
      SCOPED_TRACE("width " + std::to_string(width));
      OpKey resized = key;
      for (auto& [name, value] : resized.dims) {
        if (name == op->width_dim) value = width * op->width_step;
      }
      CheckForwardAgainstOracle(op, resized, 3, 11);
      if (testing::Test::HasFatalFailure()) return;
      const Case one = Whole(op, resized, 3);
      Case alone = one.Rows({1});
      if (!op->rows_independent) continue;
      alone.Forward();
      if (op->backward) alone.Backward();
      ExpectRows(one, {1}, alone, op->backward != nullptr);
    }
  });
}

// Token counts on both sides of the token lanes: thread counts and the oracle both agree there.
TEST(GenericOps, BoundariesOfTheTokenLanes) {
  ForEach([](const OpInfo* op, const OpKey& key) {
    const int64_t lanes = op->select(key).token_lanes;
    if (!op->backward || lanes == 0) return;
    for (int64_t rows : {int64_t{1}, lanes - 1, lanes, lanes + 1, 2 * lanes - 1, 2 * lanes + 1}) {
      const Case one = Whole(op, key, rows);
      Case many(op, key, rows);
      many.threads = 3;
      many.Forward();
      many.Backward();
      ExpectSameGradients(one, many);
    }
  });
}

// d(sum of dout * out) by fourth-order central differences of the oracle, in float64.
void CheckGradients(const OpInfo* op, const OpKey& key, int64_t rows, uint64_t seed) {
  const Oracle& oracle = Oracles().at(op->name);
  Case c(op, key, rows, seed, /*plain=*/true);
  c.Forward();
  if (testing::Test::HasFatalFailure()) return;
  c.Backward();
  Values in = ToValues(c.in);
  const Values weights = ToValues(c.dout);
  const auto loss = [&] {
    Values out = EmptyOutputs(c.sig);
    oracle(key, rows, in, out);
    double sum = 0;
    for (size_t o = 0; o < out.size(); ++o) {
      if (!c.sig.outputs[o].grad) continue;
      for (size_t i = 0; i < out[o].size(); ++i) sum += weights[o][i] * out[o][i];
    }
    return sum;
  };
  for (size_t input = 0; input < in.size(); ++input) {
    const Operand& o = c.sig.inputs[input];
    if (!o.grad) continue;
    std::vector<double> want(in[input].size());
    for (size_t i = 0; i < want.size(); ++i) {
      const double x = in[input][i];
      const double h = 1e-4 * std::max(std::abs(x), 1e-2);
      const auto at = [&](double step) {
        in[input][i] = x + step;
        return loss();
      };
      want[i] = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      in[input][i] = x;
    }
    Tensor got = c.din[input];
    if (o.role == Role::kShared) {
      for (double& w : want) w += 0.25;  // what the main gradient held before
    }
    SCOPED_TRACE("gradient of " + o.name);
    ExpectNear(o, want, got, op->select(key).gradient_tolerance);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(GenericOps, GradientIsNearTheFloat64Oracle) {
  int checked = 0;
  ForEach([&](const OpInfo* op, const OpKey& key) {
    if (!op->backward || !Oracles().contains(op->name)) return;
    CheckGradients(op, key, 3, 21);
    ++checked;
  });
  EXPECT_GT(checked, 0);
}

// A negative control: the gradient check must see a gradient that is a quarter too large.
TEST(GenericOps, GradientCheckSeesAWrongGradient) {
  for (const OpInfo* op : AllOps()) {
    if (!op->backward || !Oracles().contains(op->name)) continue;
    SCOPED_TRACE(op->name);
    OpInfo wrong = *op;
    wrong.backward = [op](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      const Status status = op->backward(ctx, key, call);
      for (Tensor& t : call.din) {
        if (!t.defined()) continue;
        for (int64_t i = 0; i < t.elements(); ++i) Put(t, i, Get(t, i) * 1.25);
      }
      return status;
    };
    testing::TestPartResultArray failures;
    {
      testing::ScopedFakeTestPartResultReporter reporter(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
      CheckGradients(&wrong, op->keys[0], 3, 21);
    }
    EXPECT_GT(failures.size(), 0);
  }
}

}  // namespace
}  // namespace tare::ops
