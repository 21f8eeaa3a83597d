// Finds the calls of tools in what a model writes, as it writes it. Formats are those of published
// chat templates:
//   hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>    Hermes, Qwen 2.5 and 3
//   llama3_json  {"name": "f", "parameters": {...}}, several divided by ;    Llama 3.1 to 3.3
//   qwen3_coder  <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
// Text that looks like a call and is none stays text: nothing is lost.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

enum class ToolFormat { kNone, kHermes, kLlama3Json, kQwen3Coder };

// The format of that name; "auto": that of the chat template.
ToolFormat tool_format(std::string_view name, std::string_view chat_template);

// Types of a function's parameters by their names ("string", "integer", ...), where its schema
// has them. By the function's name.
using ToolParameters = std::map<std::string, std::map<std::string, std::string>>;

// A piece of a call: the beginning of the next one, with its name, or more of its arguments.
struct ToolCallDelta {
  int index = 0;          // of the call, from 0
  std::string name;       // not empty: the call begins
  std::string arguments;  // pieces concatenate to JSON text
};

struct ToolCallText {
  std::string content;
  std::vector<ToolCallDelta> calls;
};

class ToolCallParser {
 public:
  virtual ~ToolCallParser() = default;
  // More of the model's text; what may still become part of a call is kept.
  virtual ToolCallText push(std::string_view piece) = 0;
  // The rest, at the end of the text.
  virtual ToolCallText finish() = 0;
};

std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format, ToolParameters parameters);

}  // namespace megatron
