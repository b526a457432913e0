// The rules of docs/map.md (GEN-26: operators depend on neither model nor runtime), read out of the
// sources: which room may include which, that the build says the same, and that no file but
// cmake/numerics.cmake holds a flag that can move a bit. Each rule is tried on a planted violation
// too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Room to the rooms that it may name; what those may include, it may too.
const std::map<std::string, std::set<std::string>>& Allowed() {
  static const std::map<std::string, std::set<std::string>> kAllowed = {
      {"base", {}},
      {"tensor", {"base"}},
      {"numerics", {"tensor"}},
      {"ops", {"numerics"}},
      {"models", {"ops"}},
      {"engine", {"models"}},
      {"trainer", {"models"}},
      {"rl", {"trainer", "engine"}},  // of engine the client side only, below
      {"compare", {"tensor"}},
      {"workflow", {"base"}},
      {"bench", {"base"}},
  };
  return kAllowed;
}

// Pairs that must not be reached by any chain of includes, whatever the table above says.
const std::vector<std::pair<std::string, std::string>> kNever = {
    {"engine", "trainer"},    {"trainer", "engine"},  {"compare", "ops"},
    {"compare", "numerics"},  {"compare", "models"},  {"workflow", "ops"},
    {"workflow", "numerics"}, {"workflow", "tensor"}, {"workflow", "models"},
    {"workflow", "engine"},   {"workflow", "trainer"}};
// Rooms without CUDA.
const std::set<std::string> kHostOnly = {"base", "compare", "workflow", "bench"};

std::set<std::string> Closure(const std::string& room) {
  std::set<std::string> out = {room};
  std::vector<std::string> open = {room};
  while (!open.empty()) {
    const std::string at = open.back();
    open.pop_back();
    const auto it = Allowed().find(at);
    if (it == Allowed().end()) continue;
    for (const std::string& next : it->second) {
      if (out.insert(next).second) open.push_back(next);
    }
  }
  return out;
}

std::string ReadText(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::string RoomOf(const std::string& file) { return file.substr(0, file.find('/')); }

bool IsSource(const fs::path& path) {
  static const std::set<std::string> kExtensions = {".h",   ".cc",  ".cu", ".cuh",
                                                    ".inc", ".cpp", ".hpp"};
  return kExtensions.count(path.extension().string()) != 0;
}

// Every violation below `root`, as "file: what".
std::vector<std::string> CheckIncludes(const fs::path& root) {
  std::vector<std::string> bad;
  std::map<std::string, std::vector<std::string>> graph;  // paths relative to src
  static const std::regex kQuoted("^[ \t]*#[ \t]*include[ \t]*\"([^\"]+)\"");
  static const std::regex kAngled("^[ \t]*#[ \t]*include[ \t]*<([^>]+)>");
  for (const auto& entry : fs::recursive_directory_iterator(root / "src")) {
    if (!entry.is_regular_file() || !IsSource(entry.path())) continue;
    const std::string file = fs::relative(entry.path(), root / "src").generic_string();
    const std::string room = RoomOf(file);
    if (Allowed().count(room) == 0) {
      bad.push_back(file + ": room " + room +
                    " is not in the table of tests/include_graph_test.cc");
      continue;
    }
    const std::set<std::string> may = Closure(room);
    std::vector<std::string>& edges = graph[file];
    if (kHostOnly.count(room) != 0 && (file.ends_with(".cu") || file.ends_with(".cuh"))) {
      bad.push_back(file + ": " + room + " holds no CUDA");
    }
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      std::smatch match;
      if (std::regex_search(line, match, kAngled)) {
        const std::string name = match[1];
        if (kHostOnly.count(room) != 0 &&
            (name.starts_with("cuda") || name.starts_with("cute/") ||
             name.starts_with("cutlass/") || name.starts_with("nccl"))) {
          bad.push_back(file + ": " + room + " includes <" + name + ">; it holds no CUDA");
        }
        continue;
      }
      if (!std::regex_search(line, match, kQuoted)) continue;
      const std::string name = match[1];
      if (name.starts_with("hwy/")) continue;  // Highway wants its own headers in quotes
      if (name.find("..") != std::string::npos || name.find('/') == std::string::npos) {
        bad.push_back(file + ": includes \"" + name + "\"; write the path from src/");
        continue;
      }
      const std::string other = RoomOf(name);
      if (!fs::exists(root / "src" / name)) {
        bad.push_back(file + ": includes \"" + name + "\", which is not below src/");
        continue;
      }
      edges.push_back(name);
      if (may.count(other) == 0) {
        bad.push_back(file + ": " + room + " may not include " + other + " (\"" + name + "\")");
      }
      if (room == "rl" && other == "engine" && name.find("client") == std::string::npos) {
        bad.push_back(file + ": of engine, rl includes the client side only, not \"" + name + "\"");
      }
    }
  }
  // Whatever the edges are called: nothing forbidden is reached by a chain.
  for (const auto& [start, unused] : graph) {
    std::set<std::string> seen = {start};
    std::vector<std::string> open = {start};
    while (!open.empty()) {
      const std::string at = open.back();
      open.pop_back();
      for (const std::string& next : graph[at]) {
        if (seen.insert(next).second) open.push_back(next);
      }
    }
    for (const auto& [from, to] : kNever) {
      if (RoomOf(start) != from) continue;
      for (const std::string& reached : seen) {
        if (RoomOf(reached) == to) {
          bad.push_back(start + ": " + from + " reaches " + to + " (\"" + reached + "\")");
          break;
        }
      }
    }
  }
  return bad;
}

// The rooms of src/CMakeLists.txt against the table.
std::vector<std::string> CheckBuild(const std::string& cmake) {
  std::vector<std::string> bad;
  static const std::regex kRoom(R"(tare_room\(\s*([a-z_]+)([^)]*)\))");
  int rooms = 0;
  for (auto it = std::sregex_iterator(cmake.begin(), cmake.end(), kRoom);
       it != std::sregex_iterator(); ++it, ++rooms) {
    const std::string room = (*it)[1];
    const std::string rest = (*it)[2];
    if (Allowed().count(room) == 0) {
      bad.push_back("room " + room + " is not in the table of tests/include_graph_test.cc");
      continue;
    }
    static const std::regex kWord("[A-Za-z_:]+");
    bool in_deps = false;
    for (auto w = std::sregex_iterator(rest.begin(), rest.end(), kWord);
         w != std::sregex_iterator(); ++w) {
      const std::string word = w->str();
      if (word == "DEPS" || word == "LIBS" || word == "SIMD") {
        in_deps = word == "DEPS";
      } else if (in_deps && Closure(room).count(word) == 0) {
        bad.push_back("room " + room + " may not depend on " + word);
      }
    }
  }
  if (rooms == 0) bad.push_back("no room found");
  return bad;
}

// Flags that change what arithmetic means, looked for in everything that drives a compiler, and
// pragmas that do, looked for in sources. Written in two pieces, so that this file passes.
// NOLINTBEGIN(bugprone-suspicious-missing-comma)
const std::vector<std::string> kForbiddenFlags = {
    "-ffast"
    "-math",
    "-O"
    "fast",
    "-funsafe"
    "-math",
    "-fassociative"
    "-math",
    "-freciprocal"
    "-math",
    "-ffp"
    "-contract",
    "-fp"
    "-model",
    "--f"
    "mad",
    "-use_fast"
    "_math",
    "--f"
    "tz=",
    "-prec"
    "-div",
    "-prec"
    "-sqrt",
    "-m"
    "arch=native",
    "-m"
    "fma",
    "-ffinite"
    "-math-only",
    "-fno-signed"
    "-zeros",
    "-frounding"
    "-math",
    "-m"
    "daz-ftz",
};
const std::vector<std::string> kForbiddenPragmas = {
    "FP_CON"
    "TRACT",
    "GCC opti"
    "mize",
    "__attribute__((opti"
    "mize",
    "clang fp "
    "contract",
    "clang fp "
    "reassociate",
    "float_con"
    "trol",
};
// NOLINTEND(bugprone-suspicious-missing-comma)

std::vector<std::string> CheckFlags(const fs::path& root) {
  std::vector<std::string> bad;
  const auto check = [&](const fs::path& path, const std::vector<std::string>& forbidden) {
    const std::string file = fs::relative(path, root).generic_string();
    if (file == "cmake/numerics.cmake") return;
    std::ifstream in(path);
    int number = 0;
    for (std::string line; std::getline(in, line);) {
      ++number;
      for (const std::string& word : forbidden) {
        if (line.find(word) != std::string::npos) {
          bad.push_back(file + ":" + std::to_string(number) + ": " + word +
                        " belongs into cmake/numerics.cmake");
        }
      }
    }
  };
  for (const char* folder : {"src", "tools", "tests", "cmake", "scripts"}) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const fs::path& p = entry.path();
      const std::string ext = p.extension().string();
      if (!entry.is_regular_file()) continue;
      if (IsSource(p)) check(p, kForbiddenPragmas);
      if (ext == ".cmake" || ext == ".sh" || ext == ".py" || p.filename() == "CMakeLists.txt") {
        check(p, kForbiddenFlags);
      }
    }
  }
  for (const char* file : {"CMakeLists.txt", "CMakePresets.json"}) {
    if (fs::exists(root / file)) check(root / file, kForbiddenFlags);
  }
  return bad;
}

// The C library's functions differ between machines: no model value comes out of one. Square root,
// fma, rounding to integer and the like are exact everywhere and not listed.
std::vector<std::string> CheckLibm(const fs::path& root) {
  std::vector<std::string> bad;
  static const std::regex kCall(
      R"(\b(?:std::|::)(exp|exp2|expm1|log|log2|log10|log1p|pow|sin|cos|tan|tanh|sinh|cosh|erf|erfc|tgamma|lgamma|cbrt|hypot)[fl]?\()");
  for (const char* room : {"numerics", "ops", "models"}) {
    if (!fs::exists(root / "src" / room)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / "src" / room)) {
      const std::string stem = entry.path().stem().string();
      if (!entry.is_regular_file() || !IsSource(entry.path()) || stem.ends_with("_test") ||
          stem.ends_with("_bench") || stem.find("oracle") != std::string::npos ||
          stem.find("testing") != std::string::npos) {
        continue;
      }
      std::ifstream in(entry.path());
      int number = 0;
      for (std::string line; std::getline(in, line);) {
        ++number;
        line = line.substr(0, line.find("//"));
        std::smatch match;
        if (std::regex_search(line, match, kCall)) {
          bad.push_back(fs::relative(entry.path(), root).generic_string() + ":" +
                        std::to_string(number) + ": calls the C library's " + match[1].str());
        }
      }
    }
  }
  return bad;
}

class Planted : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "include_graph_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    for (const auto& [room, unused] : Allowed()) Write("src/" + room + "/" + room + ".h", "");
  }
  void TearDown() override { fs::remove_all(root_); }
  void Write(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  fs::path root_;
};

TEST(IncludeGraph, SourcesKeepTheRules) { EXPECT_THAT(CheckIncludes(TARE_SOURCE_DIR), IsEmpty()); }
TEST(IncludeGraph, BuildKeepsTheRules) {
  EXPECT_THAT(CheckBuild(ReadText(fs::path(TARE_SOURCE_DIR) / "src/CMakeLists.txt")), IsEmpty());
}
TEST(NumericFlags, OnlyInTheOneFile) { EXPECT_THAT(CheckFlags(TARE_SOURCE_DIR), IsEmpty()); }
TEST(NumericFlags, NoLibmOnTheWayToAModelValue) {
  EXPECT_THAT(CheckLibm(TARE_SOURCE_DIR), IsEmpty());
}

TEST_F(Planted, AllowedEdgesPass) {
  Write("src/ops/a.h",
        "#include \"base/base.h\"\n#include \"ops/ops.h\"\n#include <cuda_runtime.h>\n");
  Write("src/rl/a.h", "#include \"engine/client.h\"\n#include \"trainer/trainer.h\"\n");
  Write("src/engine/client.h", "#include \"models/models.h\"\n");
  EXPECT_THAT(CheckIncludes(root_), IsEmpty());
}

TEST_F(Planted, ForbiddenEdgesAreCaught) {
  const std::vector<std::pair<std::string, std::string>> plants = {
      {"engine", "trainer"},   {"trainer", "engine"}, {"compare", "ops"},
      {"compare", "numerics"}, {"workflow", "ops"},   {"workflow", "numerics"},
      {"workflow", "tensor"},  {"base", "tensor"},    {"tensor", "numerics"},
      {"numerics", "ops"},     {"ops", "models"},     {"models", "engine"},
      {"models", "compare"},   {"bench", "tensor"},   {"engine", "rl"},
      {"compare", "workflow"}};
  for (const auto& [from, to] : plants) {
    const std::string file = "src/" + from + "/planted.cc";
    Write(file, "  #  include \"" + to + "/" + to + ".h\"\n");
    EXPECT_THAT(CheckIncludes(root_), Contains(HasSubstr(from + " may not include " + to)));
    fs::remove(root_ / file);
  }
  EXPECT_THAT(CheckIncludes(root_), IsEmpty());
}

// A chain through a room that lies about itself is caught where it ends.
TEST_F(Planted, ChainsAreCaught) {
  Write("src/workflow/a.h", "#include \"base/b.h\"\n");
  Write("src/base/b.h", "#include \"ops/ops.h\"\n");
  EXPECT_THAT(CheckIncludes(root_), Contains(HasSubstr("workflow/a.h: workflow reaches ops")));
}

TEST_F(Planted, OtherFaultsAreCaught) {
  Write("src/util/a.h", "");
  Write("src/base/a.h", "#include \"../tensor/tensor.h\"\n");
  Write("src/base/b.h", "#include \"b.h\"\n");
  Write("src/base/c.h", "#include \"base/absent.h\"\n");
  Write("src/workflow/d.cc", "#include <cuda_runtime.h>\n");
  Write("src/compare/e.cu", "");
  Write("src/rl/f.h", "#include \"engine/engine.h\"\n");
  const auto bad = CheckIncludes(root_);
  EXPECT_EQ(bad.size(), 7u);
  EXPECT_THAT(bad, Contains(HasSubstr("room util is not in the table")));
  EXPECT_THAT(bad, Contains(HasSubstr("base/c.h: includes \"base/absent.h\"")));
  EXPECT_THAT(bad, Contains(HasSubstr("workflow/d.cc: workflow includes <cuda_runtime.h>")));
  EXPECT_THAT(bad, Contains(HasSubstr("compare/e.cu: compare holds no CUDA")));
  EXPECT_THAT(bad, Contains(HasSubstr("rl/f.h: of engine")));
  EXPECT_THAT(CheckBuild("tare_room(base)\ntare_room(compare DEPS tensor ops LIBS x::y SIMD)"),
              Contains("room compare may not depend on ops"));
  EXPECT_THAT(CheckBuild("tare_room(misc DEPS base)"), Contains(HasSubstr("room misc")));
  EXPECT_THAT(CheckBuild(""), Contains("no room found"));
}

TEST_F(Planted, FlagsAndLibmAreCaught) {
  Write("cmake/numerics.cmake", kForbiddenFlags[0]);
  EXPECT_THAT(CheckFlags(root_), IsEmpty());
  for (const std::string& flag : kForbiddenFlags) {
    Write("src/ops/CMakeLists.txt", "add_compile_options(\n" + flag + ")\n");
    EXPECT_THAT(CheckFlags(root_), Contains(HasSubstr("src/ops/CMakeLists.txt:2: " + flag)));
  }
  Write("src/ops/CMakeLists.txt", "");
  for (const std::string& pragma : kForbiddenPragmas) {
    Write("src/ops/p.cu", "#pragma " + pragma + "\n");
    EXPECT_THAT(CheckFlags(root_), Contains(HasSubstr("src/ops/p.cu:1: " + pragma)));
  }
  Write("src/ops/p.cu", "");
  Write("src/ops/a.cc", "// std::exp(x) is not called\nfloat y = std::sqrt(x);\n");
  Write("src/ops/a_test.cc", "double y = std::exp(x);\n");
  EXPECT_THAT(CheckLibm(root_), IsEmpty());
  Write("src/ops/a.cc", "float y =\n  std::expf(x);\n");
  EXPECT_THAT(CheckLibm(root_), Contains(HasSubstr("src/ops/a.cc:2: calls the C library's exp")));
}

}  // namespace
