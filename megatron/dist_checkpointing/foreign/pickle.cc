#include "megatron/dist_checkpointing/foreign/pickle.h"

#include <bit>
#include <cstring>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"

namespace megatron {

using Kind = PickleValue::Kind;

const PickleValue* PickleValue::find(std::string_view key) const {
  for (const auto& [k, v] : entries)
    if (k->kind == Kind::kText && k->text == key) return v;
  return nullptr;
}

const PickleValue* PickleValue::attribute(std::string_view name) const {
  return kind == Kind::kObject && state != nullptr && state->kind == Kind::kDict ? state->find(name)
                                                                                 : nullptr;
}

// The stack machine of the format. Every read is bounds-checked, and every stack access is checked
// against the stack's mark.
class PickleMachine {
 public:
  PickleMachine(std::span<const std::byte> bytes, const std::string& name,
                const Pickle::Known& known, std::deque<PickleValue>& values)
      : bytes_(bytes), name_(name), known_(known), values_(values) {}

  const PickleValue* run() {
    while (step(byte())) {
    }
    PickleValue* root = pop();
    check(stack_.empty() && marks_.empty(), "it ends with values that nothing uses");
    return root;
  }

 private:
  void check(bool condition, std::string_view what) const {
    MEGATRON_CHECK(condition, name_, ": ", std::string(what), " at byte ", at_,
                   "\nhint: the file is damaged, or is no pickle; nothing of it was executed");
  }

  // -- bytes

  std::string_view take(uint64_t count) {
    check(count <= bytes_.size() - at_, "the pickle is cut short");
    const std::string_view out(reinterpret_cast<const char*>(bytes_.data()) + at_, count);
    at_ += count;
    return out;
  }
  uint8_t byte() { return static_cast<uint8_t>(take(1)[0]); }
  uint64_t little(size_t count) {
    const std::string_view text = take(count);
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i) value |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
    return value;
  }
  std::string_view line() {
    const size_t begin = at_;
    while (byte() != '\n') {
    }
    return {reinterpret_cast<const char*>(bytes_.data()) + begin, at_ - begin - 1};
  }
  double big_endian_double() {
    const std::string_view text = take(8);
    uint64_t bits = 0;
    for (const char c : text) bits = bits << 8 | static_cast<uint8_t>(c);
    return std::bit_cast<double>(bits);
  }

  // -- stack

  PickleValue* make(Kind kind) {
    PickleValue& value = values_.emplace_back();
    value.kind = kind;
    return &value;
  }
  void push(PickleValue* value) { stack_.push_back(value); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleValue* top() {
    check(stack_.size() > floor(), "a value is missing on the stack");
    return stack_.back();
  }
  PickleValue* pop() {
    PickleValue* value = top();
    stack_.pop_back();
    return value;
  }
  std::vector<PickleValue*> pop_to_mark() {
    check(!marks_.empty(), "a mark is missing on the stack");
    std::vector<PickleValue*> out(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                                  stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return out;
  }
  void remember(uint64_t index) { memo_[index] = top(); }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    check(found != memo_.end(), "it refers to a value that it has not made");
    push(found->second);
  }

  // -- values

  void push_integer(int64_t value) {
    PickleValue* out = make(Kind::kInt);
    out->integer = value;
    push(out);
  }
  void push_boolean(bool value) {
    PickleValue* out = make(Kind::kBool);
    out->integer = value ? 1 : 0;
    push(out);
  }
  void push_text(Kind kind, std::string_view text) {
    check(kind != Kind::kText || is_valid_utf8(text), "a text is not UTF-8");
    PickleValue* out = make(kind);
    out->text = text;
    push(out);
  }
  // An integer of any length; beyond 64 bits it is kept as bytes.
  void push_long(uint64_t count) {
    const std::string_view text = take(count);
    if (count > 8) return push_text(Kind::kBytes, text);
    uint64_t value = count > 0 && (text.back() & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = count; i-- > 0;) value = value << 8 | static_cast<uint8_t>(text[i]);
    push_integer(static_cast<int64_t>(value));
  }
  void push_tuple(std::vector<PickleValue*> items, Kind kind = Kind::kTuple) {
    PickleValue* out = make(kind);
    out->items.assign(items.begin(), items.end());
    push(out);
  }
  void push_tuple(size_t count) {
    std::vector<PickleValue*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push_tuple(std::move(items));
  }
  void push_name(std::string_view module, std::string_view attribute) {
    std::string full = std::string(module) + "." + std::string(attribute);
    MEGATRON_CHECK(
        known_(full), name_, ": names ", full, ", which no file of this kind needs",
        "\nhint: nothing of it was executed; the file is not what it should be, or is of a "
        "version that is not known");
    PickleValue* out = make(Kind::kName);
    out->text = std::move(full);
    push(out);
  }
  void push_object(const PickleValue* type, const PickleValue* arguments) {
    check(type->kind == Kind::kName && arguments->kind == Kind::kTuple,
          "something is called that has no name");
    PickleValue* out = make(Kind::kObject);
    out->text = type->text;
    out->items = arguments->items;
    push(out);
  }
  void append(PickleValue* list, std::span<PickleValue* const> items) {
    check(list->kind == Kind::kList || list->kind == Kind::kObject,
          "values are added to what is no list");
    list->items.insert(list->items.end(), items.begin(), items.end());
  }
  void set(PickleValue* dict, std::span<PickleValue* const> items) {
    check(dict->kind == Kind::kDict || dict->kind == Kind::kObject,
          "entries are added to what is no dict");
    check(items.size() % 2 == 0, "a dict has a key without a value");
    for (size_t i = 0; i < items.size(); i += 2) dict->entries.emplace_back(items[i], items[i + 1]);
  }
  PickleValue* dict_of(std::span<PickleValue* const> items) {
    PickleValue* out = make(Kind::kDict);
    set(out, items);
    return out;
  }

  // Executes one operation; false: it was the last.
  bool step(uint8_t code) {
    switch (code) {
      case 0x80:
        check(byte() <= 5, "the protocol is not known");
        return true;
      case 0x95:
        little(8);
        return true;  // FRAME: a hint for buffered readers
      case '.':
        return false;
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        if (stack_.size() == floor())
          pop_to_mark();
        else
          pop();
        return true;
      case '1':
        pop_to_mark();
        return true;
      case '2':
        push(top());
        return true;
      case 'N':
        push(make(Kind::kNone));
        return true;
      case 0x88:
        push_boolean(true);
        return true;
      case 0x89:
        push_boolean(false);
        return true;
      case 'J':
        push_integer(static_cast<int32_t>(little(4)));
        return true;
      case 'K':
        push_integer(static_cast<int64_t>(little(1)));
        return true;
      case 'M':
        push_integer(static_cast<int64_t>(little(2)));
        return true;
      case 0x8a:
        push_long(little(1));
        return true;
      case 0x8b:
        push_long(little(4));
        return true;
      case 'G': {
        PickleValue* out = make(Kind::kFloat);
        out->number = big_endian_double();
        push(out);
        return true;
      }
      case 0x8c:
        push_text(Kind::kText, take(little(1)));
        return true;
      case 'X':
        push_text(Kind::kText, take(little(4)));
        return true;
      case 0x8d:
        push_text(Kind::kText, take(little(8)));
        return true;
      case 'U':
        push_text(Kind::kBytes, take(little(1)));
        return true;
      case 'T':
        push_text(Kind::kBytes, take(little(4)));
        return true;
      case 'C':
        push_text(Kind::kBytes, take(little(1)));
        return true;
      case 'B':
        push_text(Kind::kBytes, take(little(4)));
        return true;
      case 0x8e:
      case 0x96:
        push_text(Kind::kBytes, take(little(8)));
        return true;
      case ')':
        push(make(Kind::kTuple));
        return true;
      case 't':
        push_tuple(pop_to_mark());
        return true;
      case 0x85:
        push_tuple(1);
        return true;
      case 0x86:
        push_tuple(2);
        return true;
      case 0x87:
        push_tuple(3);
        return true;
      case ']':
      case 0x8f:
        push(make(Kind::kList));
        return true;  // lists and sets
      case 'l':
      case 0x91:
        push_tuple(pop_to_mark(), Kind::kList);
        return true;
      case 'a': {
        PickleValue* item = pop();
        append(top(), {&item, 1});
        return true;
      }
      case 'e':
      case 0x90: {
        const std::vector<PickleValue*> items = pop_to_mark();
        append(top(), items);
        return true;
      }
      case '}':
        push(make(Kind::kDict));
        return true;
      case 'd': {
        const std::vector<PickleValue*> items = pop_to_mark();
        push(dict_of(items));
        return true;
      }
      case 's': {
        PickleValue* items[2];
        items[1] = pop();
        items[0] = pop();
        set(top(), items);
        return true;
      }
      case 'u': {
        const std::vector<PickleValue*> items = pop_to_mark();
        set(top(), items);
        return true;
      }
      case 'c': {
        const std::string_view module = line();
        push_name(module, line());
        return true;
      }
      case 0x93: {
        const PickleValue *attribute = pop(), *module = pop();
        check(module->kind == Kind::kText && attribute->kind == Kind::kText, "a name is no text");
        push_name(module->text, attribute->text);
        return true;
      }
      case 'R':
      case 0x81: {  // an object constructed by its class
        const PickleValue *arguments = pop(), *type = pop();
        push_object(type, arguments);
        return true;
      }
      case 0x92: {  // the same with keyword arguments
        const PickleValue *named = pop(), *arguments = pop(), *type = pop();
        check(named->kind == Kind::kDict, "something is called that has no name");
        push_object(type, arguments);
        stack_.back()->entries = named->entries;
        return true;
      }
      case 'b': {
        const PickleValue* state = pop();
        check(top()->kind == Kind::kObject, "a state is given to what is no object");
        top()->state = state;
        return true;
      }
      case 'Q': {
        const PickleValue* reference = pop();
        PickleValue* out = make(Kind::kPersistent);
        out->items = {reference};
        push(out);
        return true;
      }
      case 0x94:
        remember(memo_.size());
        return true;
      case 'q':
        remember(little(1));
        return true;
      case 'r':
        remember(little(4));
        return true;
      case 'h':
        recall(little(1));
        return true;
      case 'j':
        recall(little(4));
        return true;
      default:
        check(false,
              cat("it holds the operation ", static_cast<int>(code), ", which is not built,"));
        return false;
    }
  }

  std::span<const std::byte> bytes_;
  const std::string& name_;
  const Pickle::Known& known_;
  std::deque<PickleValue>& values_;
  size_t at_ = 0;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;  // stack sizes at the marks
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

Pickle::Pickle(std::span<const std::byte> bytes, const std::string& name, const Known& known)
    : values_(std::make_unique<std::deque<PickleValue>>()) {
  root_ = PickleMachine(bytes, name, known, *values_).run();
}

namespace pickle {
namespace {

std::string little(uint64_t value, size_t bytes) {
  std::string out(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(value >> (8 * i));
  return out;
}

std::string marked(std::span<const std::string> items) {
  std::string out = "(";
  for (const std::string& item : items) out += item;
  return out;
}

}  // namespace

std::string none() { return "N"; }
std::string boolean(bool value) { return value ? "\x88" : "\x89"; }

std::string integer(int64_t value) {
  if (value >= INT32_MIN && value <= INT32_MAX)
    return "J" + little(static_cast<uint64_t>(value), 4);
  return "\x8a\x08" + little(static_cast<uint64_t>(value), 8);
}

std::string number(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  std::string out = "G";
  for (int i = 7; i >= 0; --i) out += static_cast<char>(bits >> (8 * i));
  return out;
}

std::string text(std::string_view value) {
  return "X" + little(value.size(), 4) + std::string(value);
}

std::string name(std::string_view module, std::string_view attribute) {
  return "c" + std::string(module) + "\n" + std::string(attribute) + "\n";
}

std::string tuple(std::span<const std::string> items) {
  return items.empty() ? ")" : marked(items) + "t";
}
std::string list(std::span<const std::string> items) { return "]" + marked(items) + "e"; }

std::string dict(std::span<const std::pair<std::string, std::string>> entries) {
  std::string out = "}(";
  for (const auto& [key, value] : entries) out += key + value;
  return out + "u";
}

std::string call(const std::string& function, std::span<const std::string> arguments) {
  return function + tuple(arguments) + "R";
}

std::string object(const std::string& type, const std::string& state) {
  return type + ")\x81" + state + "b";
}
std::string persistent(const std::string& reference) { return reference + "Q"; }
std::string file(const std::string& root) { return "\x80\x02" + root + "."; }

}  // namespace pickle

}  // namespace megatron
