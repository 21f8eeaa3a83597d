#include "megatron/chat/detail/jinja_runtime.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

using Value = JinjaValue;
using Expression = JinjaExpression;
using Kind = JinjaExpression::Kind;
using Statement = JinjaStatement;

// Limits that no chat reaches and a runaway template reaches soon.
constexpr int64_t kMostSteps = 2'000'000;
constexpr size_t kMostText = size_t{1} << 28;
constexpr int kMostCalls = 100;  // nested macro calls

constexpr const char* kCallLoop = "(call)";  // key of `loop` for calling it

// The variables of a template, loop or macro.
struct Scope {
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string, Value>> variables;

  const Value* find(const std::string& name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->parent.get())
      for (const auto& [own, value] : scope->variables)
        if (own == name) return &value;
    return nullptr;
  }
  void set(const std::string& name, Value value) {
    for (auto& [own, old] : variables) {
      if (own != name) continue;
      old = std::move(value);
      return;
    }
    variables.emplace_back(name, std::move(value));
  }
};
using ScopePtr = std::shared_ptr<Scope>;

ScopePtr inner(const ScopePtr& parent) { return std::make_shared<Scope>(Scope{parent, {}}); }

std::string construct_of(const Expression& e) {
  switch (e.kind) {
    case Kind::kName:
      return cat("the variable ", e.name);
    case Kind::kCompare:
      return cat("the comparison ", e.names.front());
    case Kind::kBinary:
      return cat("the operator ", e.name);
    case Kind::kAttribute:
      return cat("the attribute ", e.name);
    case Kind::kItem:
      return "a subscript";
    case Kind::kSlice:
      return "a slice";
    case Kind::kFilter:
      return cat("the filter ", e.name);
    case Kind::kTest:
      return cat("the test ", e.name);
    case Kind::kCall: {
      const Expression& callee = *e.operands[0];
      const bool named = callee.kind == Kind::kName || callee.kind == Kind::kAttribute;
      return named ? cat("the call of ", callee.name) : "a call";
    }
    default:
      return "an expression";
  }
}

std::string construct_of(const Statement& s) {
  switch (s.kind) {
    case Statement::Kind::kFor:
      return "{% for %}";
    case Statement::Kind::kSet:
    case Statement::Kind::kSetBlock:
      return "{% set %}";
    case Statement::Kind::kCall:
      return "{% call %}";
    case Statement::Kind::kFilter:
      return "{% filter %}";
    default:
      return "a statement";
  }
}

enum class Flow { kOn, kBreak, kContinue };

class Renderer {
 public:
  JinjaOutput run(const JinjaBody& body, std::vector<std::pair<std::string, Value>> variables) {
    globals_ = inner(std::make_shared<Scope>(Scope{nullptr, std::move(variables)}));
    out_ = &output_.text;
    execute(body, globals_);
    return std::move(output_);
  }

 private:
  void step() {
    if (++steps_ > kMostSteps)
      throw JinjaError{cat("the template did not end within ", kMostSteps, " steps")};
  }

  // -- expressions

  Value evaluate(const Expression& e, const ScopePtr& scope) {
    try {
      return value_of(e, scope);
    } catch (JinjaError& error) {
      throw JinjaRuntimeError{e.offset, construct_of(e), std::move(error.message)};
    }
  }

  Value value_of(const Expression& e, const ScopePtr& scope) {
    step();
    const auto operand = [&](size_t i) { return evaluate(*e.operands[i], scope); };
    switch (e.kind) {
      case Kind::kConstant:
        return e.constant;
      case Kind::kName: {
        const Value* found = scope->find(e.name);
        return found != nullptr ? *found
                                : Value(JinjaUndefined{cat("'", e.name, "' is undefined")});
      }
      case Kind::kList:
      case Kind::kTuple: {
        std::vector<Value> items;
        for (size_t i = 0; i < e.operands.size(); ++i) items.push_back(operand(i));
        return e.kind == Kind::kList ? Value::list(std::move(items))
                                     : Value::tuple(std::move(items));
      }
      case Kind::kDict: {
        auto mapping = std::make_shared<JinjaMapping>();
        for (size_t i = 0; i < e.operands.size(); i += 2) {
          Value key = operand(i);
          mapping->set(key, operand(i + 1));
        }
        return mapping;
      }
      case Kind::kNot:
        return !operand(0).truth();
      case Kind::kNegative:
        return jinja_binary("-", Value(int64_t{0}), operand(0));
      case Kind::kPositive:
        return jinja_binary("+", Value(int64_t{0}), operand(0));
      case Kind::kAnd: {
        Value left = operand(0);
        return left.truth() ? operand(1) : left;
      }
      case Kind::kOr: {
        Value left = operand(0);
        return left.truth() ? left : operand(1);
      }
      case Kind::kCompare:
        return compare(e, scope);
      case Kind::kBinary: {
        const Value left = operand(0);
        return jinja_binary(e.name, left, operand(1));
      }
      case Kind::kAttribute:
        return jinja_attribute(operand(0), e.name);
      case Kind::kItem: {
        const Value value = operand(0);
        return jinja_item(value, operand(1));
      }
      case Kind::kSlice:
        return slice(e, scope);
      case Kind::kCall:
        return call(e, scope);
      case Kind::kFilter: {
        JinjaArguments arguments = arguments_of(e, scope);
        const Value value = std::move(arguments.positional.front());
        arguments.positional.erase(arguments.positional.begin());
        return apply_jinja_filter(e.name, value, arguments);
      }
      case Kind::kTest: {
        JinjaArguments arguments = arguments_of(e, scope);
        const Value value = std::move(arguments.positional.front());
        arguments.positional.erase(arguments.positional.begin());
        return apply_jinja_test(e.name, value, arguments);
      }
      case Kind::kSpread:
        break;  // only among arguments
      case Kind::kCondition:
        if (operand(1).truth()) return operand(0);
        return e.operands[2] ? operand(2)
                             : Value(JinjaUndefined{"the inline if without else was false"});
    }
    return {};
  }

  Value compare(const Expression& e, const ScopePtr& scope) {
    Value left = evaluate(*e.operands[0], scope);
    for (size_t i = 0; i < e.names.size(); ++i) {
      Value right = evaluate(*e.operands[i + 1], scope);
      const std::string& op = e.names[i];
      bool holds = false;
      if (op == "==" || op == "!=") {
        holds = equal(left, right) == (op == "==");
      } else if (op == "in" || op == "not in") {
        holds = jinja_contains(right, left) == (op == "in");
      } else {
        const bool below = op == "<" || op == "<=";
        const Value &a = below ? left : right, &b = below ? right : left;
        holds = less(a, b) || (op.size() == 2 && equal(a, b));
      }
      if (!holds) return false;
      left = std::move(right);
    }
    return true;
  }

  Value slice(const Expression& e, const ScopePtr& scope) {
    const Value value = evaluate(*e.operands[0], scope);
    if (!value.is_string() && !value.is_sequence()) {
      if (value.is_undefined()) throw JinjaError{value.undefined_reason()};
      return Value(JinjaUndefined{cat(value.type_name(), " object has no slices")});
    }
    const auto count = value.is_string() ? python_length(value.string())
                                         : static_cast<int64_t>(value.items().size());
    const auto bound = [&](size_t i) {
      if (!e.operands[i]) return Value(JinjaNone{});
      Value given = evaluate(*e.operands[i], scope);
      if (!given.is_none() && !given.is_integer() && !given.is_bool())
        throw JinjaError{cat("a slice by ", given.type_name(), ", expected integers")};
      return given;
    };
    const Value first = bound(1), last = bound(2), by = bound(3);
    const int64_t stride = by.is_none() ? 1 : by.integer();
    if (stride == 0) throw JinjaError{"a slice with a step of zero"};
    const auto clamp = [&](const Value& given, int64_t otherwise) {
      if (given.is_none()) return otherwise;
      const int64_t low = stride > 0 ? 0 : -1, high = stride > 0 ? count : count - 1;
      int64_t index = given.integer();
      if (index < 0) index = index < -count ? low : index + count;
      return std::clamp(index, low, std::max(low, high));
    };
    const int64_t begin = clamp(first, stride > 0 ? 0 : count - 1),
                  end = clamp(last, stride > 0 ? count : -1);
    if (value.is_string() && stride == 1) {
      const std::string& text = value.string();
      const size_t from = python_offset(text, begin);
      jinja_check_room(text.size() / 16);
      return text.substr(from, python_offset(std::string_view(text).substr(from), end - begin));
    }
    const std::vector<Value> elements = jinja_elements(value);
    std::vector<Value> chosen;
    for (int64_t i = begin; stride > 0 ? i < end : i > end; i += stride) {
      chosen.push_back(elements[static_cast<size_t>(i)]);
      if (stride > count || stride < -count) break;
    }
    if (value.is_sequence())
      return value.sequence()->is_tuple ? Value::tuple(std::move(chosen))
                                        : Value::list(std::move(chosen));
    std::string text;
    for (const Value& c : chosen) text += c.string();
    return text;
  }

  void spread(const Expression& e, const ScopePtr& scope, JinjaArguments& arguments) {
    const Value value = evaluate(*e.operands[0], scope);
    if (e.name == "*") {
      for (Value& item : jinja_elements(value)) arguments.positional.push_back(std::move(item));
      return;
    }
    if (!value.is_mapping()) throw JinjaError{cat("** of ", value.type_name(), ", expected dict")};
    for (const auto& [name, item] : value.mapping()->entries)
      arguments.named.emplace_back(jinja_text(name), item);
  }

  JinjaArguments arguments_of(const Expression& e, const ScopePtr& scope) {
    JinjaArguments arguments;
    for (const JinjaExpressionPtr& operand : e.operands) {
      if (operand->kind == Kind::kSpread) {
        spread(*operand, scope, arguments);
      } else {
        arguments.positional.push_back(evaluate(*operand, scope));
      }
    }
    for (const auto& [name, value] : e.named)
      arguments.named.emplace_back(name, evaluate(*value, scope));
    return arguments;
  }

  Value call(const Expression& e, const ScopePtr& scope, Value caller = {}) {
    JinjaArguments arguments = arguments_of(e, scope);
    const Value callee = std::move(arguments.positional.front());
    arguments.positional.erase(arguments.positional.begin());
    if (caller.is_callable()) arguments.named.emplace_back("caller", std::move(caller));
    if (callee.is_undefined()) throw JinjaError{callee.undefined_reason()};
    if (callee.is_mapping())
      if (const Value* again = callee.mapping()->find(std::string_view(kCallLoop)))
        return again->callable().call(arguments);
    if (!callee.is_callable())
      throw JinjaError{cat("an object of type ", callee.type_name(), " cannot be called")};
    return callee.callable().call(arguments);
  }

  // -- statements

  void write(const std::string& text) {
    if (out_->size() + text.size() > kMostText)
      throw JinjaError{cat("the text is longer than ", kMostText, " bytes")};
    jinja_charge(text.size());
    *out_ += text;
  }

  // The text that `run` outputs.
  template <class Run>
  std::string captured(const Run& run) {
    std::string text;
    std::string* outer = std::exchange(out_, &text);
    run();
    out_ = outer;
    return text;
  }
  std::string captured(const JinjaBody& body, const ScopePtr& scope) {
    return captured([&] { execute(body, scope); });
  }

  Flow execute(const JinjaBody& body, const ScopePtr& scope) {
    for (const auto& statement : body) {
      const Flow flow = execute(*statement, scope);
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Flow execute(const Statement& s, const ScopePtr& scope) {
    try {
      return run_statement(s, scope);
    } catch (JinjaError& error) {
      throw JinjaRuntimeError{s.offset, construct_of(s), std::move(error.message)};
    }
  }

  Flow run_statement(const Statement& s, const ScopePtr& scope) {
    step();
    switch (s.kind) {
      case Statement::Kind::kText:
        write(s.text);
        break;
      case Statement::Kind::kOutput:
        write(jinja_text(evaluate(*s.expressions[0], scope)));
        break;
      case Statement::Kind::kIf:
        return branch(s, scope);
      case Statement::Kind::kFor:
        return loop(s, scope);
      case Statement::Kind::kSet:
        assign(*s.target, evaluate(*s.expressions[0], scope), scope);
        break;
      case Statement::Kind::kSetBlock: {
        Value text = captured(s.bodies[0], inner(scope));
        if (s.expressions[0]) text = filtered(*s.expressions[0], std::move(text), scope);
        assign(*s.target, std::move(text), scope);
        break;
      }
      case Statement::Kind::kMacro:
        scope->set(s.name, macro(s, scope));
        break;
      case Statement::Kind::kCall:
        write(jinja_text(call(*s.expressions[0], scope, macro(s, scope))));
        break;
      case Statement::Kind::kFilter:
        write(jinja_text(filtered(*s.expressions[0], captured(s.bodies[0], inner(scope)), scope)));
        break;
      case Statement::Kind::kWith: {
        const ScopePtr with = inner(scope);
        for (const auto& [name, value] : s.parameters) with->set(name, evaluate(*value, scope));
        return execute(s.bodies[0], with);
      }
      case Statement::Kind::kGeneration: {
        const size_t begin = out_->size();
        const Flow flow = execute(s.bodies[0], inner(scope));
        if (out_ == &output_.text) output_.generated.emplace_back(begin, out_->size());
        return flow;
      }
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kOn;
  }

  Value filtered(const Expression& chain, Value text, const ScopePtr& scope) {
    const ScopePtr with_text = inner(scope);
    with_text->set(kJinjaBlockText, std::move(text));
    return evaluate(chain, with_text);
  }

  Flow branch(const Statement& s, const ScopePtr& scope) {
    for (size_t i = 0; i < s.expressions.size(); ++i)
      if (evaluate(*s.expressions[i], scope).truth()) return execute(s.bodies[i], scope);
    return s.bodies.size() > s.expressions.size() ? execute(s.bodies.back(), scope) : Flow::kOn;
  }

  void assign(const Expression& target, Value value, const ScopePtr& scope) {
    if (target.kind == Kind::kName) {
      scope->set(target.name, std::move(value));
    } else if (target.kind == Kind::kAttribute) {
      const Value object = evaluate(*target.operands[0], scope);
      if (!object.is_mapping() || !object.mapping()->is_namespace)
        throw JinjaError{cat("cannot set the attribute ", target.name, " of an object of type ",
                             object.type_name(), ", only of a namespace()")};
      object.mapping()->set(Value::text(target.name), std::move(value));
    } else {
      const std::vector<Value> items = jinja_elements(value);
      if (items.size() != target.operands.size())
        throw JinjaError{
            cat("cannot unpack ", items.size(), " values into ", target.operands.size(), " names")};
      for (size_t i = 0; i < items.size(); ++i) assign(*target.operands[i], items[i], scope);
    }
  }

  Flow loop(const Statement& s, const ScopePtr& scope) {
    const Value iterable = evaluate(*s.expressions[0], scope);
    run_loop(s, scope, iterable, 0);
    return Flow::kOn;
  }

  void run_loop(const Statement& s, const ScopePtr& scope, const Value& iterable, int64_t depth) {
    if (depth > kMostCalls) throw JinjaError{"a recursive loop is nested too deeply"};
    std::vector<Value> items = jinja_elements(iterable);
    if (s.expressions[1]) {
      std::erase_if(items, [&](const Value& item) {
        const ScopePtr own = inner(scope);
        assign(*s.target, item, own);
        return !evaluate(*s.expressions[1], own).truth();
      });
    }
    if (items.empty()) {
      execute(s.bodies[1], inner(scope));
      return;
    }
    const auto changed = std::make_shared<Value>();
    for (size_t i = 0; i < items.size(); ++i) {
      step();
      const ScopePtr own = inner(scope);
      assign(*s.target, items[i], own);
      if (s.uses_loop) own->set("loop", loop_value(s, scope, items, i, depth, changed));
      if (execute(s.bodies[0], own) == Flow::kBreak) break;
    }
  }

  Value loop_value(const Statement& s, const ScopePtr& scope, const std::vector<Value>& items,
                   size_t i, int64_t depth, const std::shared_ptr<Value>& last) {
    auto loop = std::make_shared<JinjaMapping>();
    loop->is_namespace = true;
    const auto count = static_cast<int64_t>(items.size()), index = static_cast<int64_t>(i);
    const auto add = [&](const char* name, Value value) {
      loop->depth = std::max(loop->depth, 1 + value.depth());
      loop->entries.emplace_back(Value::text(name), std::move(value));
    };
    add("index", index + 1);
    add("index0", index);
    add("first", index == 0);
    add("last", index + 1 == count);
    add("length", count);
    add("revindex", count - index);
    add("revindex0", count - index - 1);
    add("previtem", i > 0 ? items[i - 1] : Value(JinjaUndefined{"there is no previous item"}));
    add("nextitem",
        i + 1 < items.size() ? items[i + 1] : Value(JinjaUndefined{"there is no next item"}));
    add("depth", depth + 1);
    add("depth0", depth);
    add("cycle", jinja_function([index](JinjaArguments& arguments) {
          if (arguments.positional.empty()) throw JinjaError{"no items for cycling given"};
          return arguments.positional[static_cast<size_t>(index) % arguments.positional.size()];
        }));
    add("changed", jinja_function([last](JinjaArguments& arguments) {
          Value now = Value::tuple(arguments.positional);
          const bool differs = last->is_undefined() || !equal(*last, now);
          *last = std::move(now);
          return Value(differs);
        }));
    if (s.recursive) {
      const std::weak_ptr<Scope> outer = scope;  // kept alive by its owner while the loop runs
      add(kCallLoop, jinja_function([this, &s, outer, depth](JinjaArguments& arguments) {
            const ScopePtr alive = outer.lock();
            const Value* deeper = arguments.find(0, "iterable");
            if (deeper == nullptr || !alive) throw JinjaError{"loop() needs what to walk over"};
            return Value(captured([&] { run_loop(s, alive, *deeper, depth + 1); }));
          }));
    }
    return loop;
  }

  Value macro(const Statement& s, const ScopePtr& scope) {
    const std::weak_ptr<Scope> outer = scope;  // weak, since the scope owns the macro
    return jinja_function([this, &s, outer](JinjaArguments& arguments) {
      const std::string name = s.name.empty() ? "caller" : s.name;
      if (++calls_ > kMostCalls)
        throw JinjaError{cat("macros call each other more than ", kMostCalls, " times deep")};
      const ScopePtr own = inner(outer.expired() ? globals_ : outer.lock());
      for (size_t i = 0; i < s.parameters.size(); ++i) {
        const auto& [parameter, otherwise] = s.parameters[i];
        if (const Value* given = arguments.find(i, parameter))
          own->set(parameter, *given);
        else
          own->set(parameter, otherwise ? evaluate(*otherwise, own)
                                        : Value(JinjaUndefined{cat("parameter '", parameter,
                                                                   "' was not provided")}));
      }
      if (const Value* caller = arguments.find(static_cast<size_t>(-1), "caller"))
        own->set("caller", *caller);
      if (arguments.positional.size() > s.parameters.size())
        throw JinjaError{cat("the macro ", name, " takes ", s.parameters.size(), " arguments, got ",
                             arguments.positional.size())};
      arguments.check_all_used(s.parameters.size());
      std::string text = captured(s.bodies[0], own);
      --calls_;
      return Value(std::move(text));
    });
  }

  JinjaOutput output_;
  std::string* out_ = nullptr;
  ScopePtr globals_;
  int64_t steps_ = 0;
  int calls_ = 0;
};

}  // namespace

const JinjaValue* JinjaArguments::find(size_t index, std::string_view name) {
  asked_.emplace_back(name);
  if (index < positional.size()) return &positional[index];
  for (const auto& [own, value] : named)
    if (own == name) return &value;
  return nullptr;
}

JinjaValue JinjaArguments::get(size_t index, std::string_view name, JinjaValue otherwise) {
  const JinjaValue* found = find(index, name);
  return found != nullptr ? *found : otherwise;
}

void JinjaArguments::check_all_used(size_t most_positional) const {
  if (positional.size() > most_positional)
    throw JinjaError{cat("takes at most ", most_positional, " arguments, got ", positional.size())};
  for (const auto& [name, value] : named)
    if (std::find(asked_.begin(), asked_.end(), name) == asked_.end())
      throw JinjaError{cat("has no argument named ", name)};
}

JinjaValue jinja_function(std::function<JinjaValue(JinjaArguments&)> call) {
  return JinjaValue(std::make_shared<const JinjaCallable>(JinjaCallable{std::move(call)}));
}

JinjaOutput render_jinja(const JinjaBody& body,
                         std::vector<std::pair<std::string, JinjaValue>> variables,
                         uint64_t most_bytes) {
  const JinjaBudget budget(most_bytes);
  return Renderer().run(body, std::move(variables));
}

}  // namespace megatron
