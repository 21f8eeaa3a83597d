#include "tests/unit/flags/flag_walk.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <regex>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

bool is_source(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".cc" || extension == ".h" || extension == ".cu";
}

std::string without_comments(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const size_t end = std::min(text.find('\n', i), text.size());
    const std::string line = text.substr(i, end - i);
    const size_t mark = line.find("//");
    const bool in_text =
        mark != std::string::npos && mark > 0 && (line[mark - 1] == ':' || line[mark - 1] == '"');
    out += mark == std::string::npos || in_text ? line : line.substr(0, mark);
    out += '\n';
    i = end + 1;
  }
  return out;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

bool has_identifier(const std::string& text, std::string_view name) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    if ((at == 0 || !is_word(text[at - 1])) && (end == text.size() || !is_word(text[end])))
      return true;
  }
  return false;
}

// "source PATH: text" and "lacks PATH: text".
std::string fault_of_file(const std::string& what, bool wanted, const SourceTree& tree) {
  const size_t colon = what.find(": ");
  const auto file = tree.code.find(what.substr(0, colon));
  if (colon == std::string::npos || file == tree.code.end()) return "names no file of the tree";
  const bool found = file->second.find(what.substr(colon + 2)) != std::string::npos;
  if (found == wanted) return "";
  return cat(file->first, wanted ? " lacks \"" : " contains \"", what.substr(colon + 2), "\"");
}

std::string fault_of_evidence(const std::string& shown_by, const std::string& spelling,
                              const Ask& ask, const SourceTree& tree) {
  const size_t blank = shown_by.find(' ');
  const std::string kind = shown_by.substr(0, blank);
  const std::string what = blank == std::string::npos ? "" : shown_by.substr(blank + 1);
  if (kind == "test") return tree.tests.count(what) > 0 ? "" : "no test is called " + what;
  if (kind == "field") return tree.fields.count(what) > 0 ? "" : "no field is called " + what;
  if (kind == "source" || kind == "lacks") return fault_of_file(what, kind == "source", tree);
  if (kind == "absent") {
    for (const auto& [path, text] : tree.code)
      if (text.find(what) != std::string::npos) return cat(path, " contains \"", what, "\"");
    return "";
  }
  if (kind == "refused") {
    std::string other = what;
    if (other.empty() && spelling.starts_with("--no-")) other = "--" + spelling.substr(5);
    if (other.empty()) return "has no flag that it switches off";
    return ask(other).kind == Answer::Kind::kRefused ? "" : other + " is not refused";
  }
  return cat("\"", shown_by, "\" shows nothing");
}

// Reasons from before there were several ranks.
std::string stale_words(const std::string& reason) {
  static const std::regex stale(
      "a run has one rank|(^|; )(tensor|pipeline|context) parallelism[^;]*not built|several "
      "ranks[^;]*not built|"
      "conversion[^;]*not built");
  std::smatch match;
  return std::regex_search(reason, match, stale) ? match.str() : "";
}

}  // namespace

SourceTree SourceTree::read(const std::string& root) {
  SourceTree tree;
  for (const char* folder : {"megatron", "tools"}) {
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(root) / folder)) {
      const std::string path = fs::relative(entry.path(), root).string();
      if (!entry.is_regular_file() || !is_source(entry.path())) continue;
      if (path.ends_with("/flag_table.cc") || path.ends_with("/flag_claims.h")) continue;
      tree.code[path] = without_comments(read_file(entry.path().string()));
    }
  }
  static const std::regex test("\n(?:TEST|TEST_F|TEST_P|TYPED_TEST)\\((\\w+),\\s*(\\w+)\\)");
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(root) / "tests")) {
    if (!entry.is_regular_file() || !is_source(entry.path())) continue;
    const std::string text = "\n" + read_file(entry.path().string());
    for (std::sregex_iterator it(text.begin(), text.end(), test), end; it != end; ++it)
      tree.tests.insert((*it)[1].str() + "." + (*it)[2].str());
  }
  return tree;
}

std::string fault_of(const KnownFlag& row, const std::string& spelling, const Answer& answer,
                     const Ask& ask, const SourceTree& tree) {
  if (answer.kind == Answer::Kind::kField) return "";
  if (answer.reason.size() < 10) return "gives no reason";
  if (const std::string words = stale_words(answer.reason); !words.empty())
    return cat("says \"", words, "\"");
  const FlagClaim* claim = row.claim;
  if (answer.kind == Answer::Kind::kRefused) {
    if (row.kind == KnownFlag::Kind::kRefused)
      return answer.reason == row.reason ? "" : "is refused for another reason than its own";
    if (claim == nullptr || claim->holds == nullptr)
      return "is refused, but its claim holds in every run";
    return answer.reason == claim->otherwise ? "" : "is refused for another reason than its own";
  }
  if (row.kind == KnownFlag::Kind::kRefused) return "is accepted, but its row says refused";
  if (claim == nullptr) return "is accepted, and claims nothing";
  if (claim->holds != nullptr && (claim->when.empty() || claim->otherwise.empty()))
    return "has a condition without words";
  return fault_of_evidence(std::string(claim->shown_by), spelling, ask, tree);
}

bool is_read_outside(const SourceTree& tree, std::string_view identifier,
                     const std::set<std::string>& owners) {
  for (const auto& [path, text] : tree.code)
    if (owners.count(path) == 0 && has_identifier(text, identifier)) return true;
  return false;
}

std::string function_body(const SourceTree& tree, const std::string& path,
                          const std::string& name) {
  const auto file = tree.code.find(path);
  if (file == tree.code.end()) return "";
  const std::string& text = file->second;
  std::string bodies;
  for (size_t at = text.find(name + "("); at != std::string::npos;
       at = text.find(name + "(", at + 1)) {
    if (at > 0 && is_word(text[at - 1])) continue;
    const size_t brace = text.find('{', at), semicolon = text.find(';', at);
    if (brace == std::string::npos || semicolon < brace) continue;  // a call or a declaration
    int depth = 0;
    for (size_t i = brace; i < text.size(); ++i) {
      depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
      if (depth == 0) {
        bodies += text.substr(at, i - at) + "\n";
        break;
      }
    }
  }
  return bodies;
}

}  // namespace megatron
