// JSON of requests: what is refused, and where the fault is said to be.
#include "megatron/serving/detail/json_input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/serving/detail/json_fault.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string fault(const std::string& text, size_t depth = 8) {
  const auto found = find_json_fault(text, depth);
  return found ? cat(found->path, "|", found->what, "|", found->offset) : "";
}

TEST(JsonFault, SaysWhatAndWhere) {
  for (const char* const good :
       {"{}", "[]", "0", "\"a\"", " { \"a\" : [ 1 , -2.5e-3 , true , null ] } ", "1e-999",
        "18446744073709551615", "\"\\ud83d\\ude00\\u0041\\n\"", "\"\xe4\xbd\xa0\""})
    EXPECT_EQ(fault(good), "") << good;
  EXPECT_EQ(fault("{\"a\": NaN}"), "a|NaN, which is no number of JSON|6");
  EXPECT_EQ(fault("{\"a\": -Infinity}"), "a|no number|7");
  EXPECT_EQ(fault("{\"a\": {\"b\": [0, 1e999]}}"), "a.b[1]|1e999, a number beyond doubles|16");
  EXPECT_THAT(fault(std::string(324, '8') + "e-5"), HasSubstr("8..., a number beyond doubles|0"));
  EXPECT_EQ(fault("0." + std::string(400, '0') + "1"), "") << "too small for a double is zero";
  EXPECT_EQ(fault(std::string(300, '8') + "e-" + std::string(30, '9')), "");
  EXPECT_EQ(fault("{\"n\": 123456789012345678901}"),
            "n|123456789012345678901, an integer beyond 64 bits|6");
  EXPECT_EQ(fault("{\"a\": \"\xff\"}"), "a|bytes that are not UTF-8|7");
  EXPECT_EQ(fault("{\"a\": \"\xc0\xaf\"}"), "a|bytes that are not UTF-8|7");
  EXPECT_EQ(fault("{\"a\": \"\xed\xa0\x80\"}"), "a|bytes that are not UTF-8|7");
  EXPECT_EQ(fault("{\"a\": \"\\ud800\"}"), "a|half a surrogate pair within a text|7");
  EXPECT_EQ(fault("{\"a\": \"\\ud800\\u0041\"}"), "a|half a surrogate pair within a text|7");
  EXPECT_EQ(fault("{\"a\": \"\\x\"}"), "a|an unknown escape within a text|7");
  EXPECT_EQ(fault("{\"a\": \"\n\"}"), "a|a control character within a text|7");
  EXPECT_EQ(fault("{\"a\": 01}"), "a|no number|8");
  EXPECT_EQ(fault("{\"a\": 1.}"), "a|no digits after the point of a number|8");
  EXPECT_EQ(fault("{\"a\": 1e}"), "a|no digits in the exponent of a number|8");
  EXPECT_EQ(fault("{\"a\": 1,}"), "|no name of a member|8");
  EXPECT_EQ(fault("{\"a\" 1}"), "a|no colon after the name of a member|5");
  EXPECT_EQ(fault("{\"a\": 1 \"b\"}"), "a|no comma or brace after a member|8");
  EXPECT_EQ(fault("[1 2]"), "[0]|no comma or bracket after an item|3");
  EXPECT_EQ(fault("{\"a\": tru}"), "a|no value|6");
  EXPECT_EQ(fault("{} x"), "|more text after the end of the document|3");
  EXPECT_EQ(fault("{\"a\": ["), "a[0]|the end of the text within the document|7");
  EXPECT_EQ(fault(""), "|the end of the text within the document|0");
  EXPECT_EQ(fault("[[[1]]]", 2), "[0][0]|values nested deeper than 2|2");
  EXPECT_EQ(fault("\"abc"), "|a text without its closing quote|4");
  // Paths are cut, whatever the names are.
  EXPECT_LT(fault("{\"" + std::string(10'000, 'k') + "\": x}").size(), 400u);
  EXPECT_LT(fault(std::string(100'000, '['), 100'000).size(), 400u);
}

TEST(JsonInput, MembersHaveTheirKinds) {
  const JsonDocument document(
      R"({"i": 3, "f": 3.0, "x": 2.5, "t": "a", "b": true, "n": null, "l": [1], "o": {"k": 1}})",
      16);
  JsonObject json = document.root();
  EXPECT_EQ(json.integer("i"), 3);
  EXPECT_EQ(json.integer("f"), 3);
  EXPECT_EQ(json.number("i"), 3.0);
  EXPECT_EQ(json.number("x"), 2.5);
  EXPECT_EQ(json.text("t"), "a");
  EXPECT_EQ(json.boolean("b"), true);
  EXPECT_EQ(json.integer("n"), std::nullopt);
  EXPECT_EQ(json.integer("missing"), std::nullopt);
  EXPECT_THAT(json.unknown(), ElementsAre("l", "o"));
  EXPECT_EQ(json.object("o")->integer("k"), 1);
  EXPECT_THAT(error_of([&] { json.integer("x"); }), "x is 2.5; expected an integer of 64 bits");
  EXPECT_THAT(error_of([&] { json.integer("t"); }), "t is a text; expected an integer");
  EXPECT_THAT(error_of([&] { json.number("b"); }), "b is true or false; expected a number");
  EXPECT_THAT(error_of([&] { json.boolean("i"); }), "i is a number; expected true or false");
  EXPECT_THAT(error_of([&] { json.text("l"); }), "l is a list; expected a text");
  EXPECT_THAT(error_of([&] { json.array("o"); }), "o is an object; expected a list");
  EXPECT_THAT(error_of([&] { json.object("l"); }), "l is a list; expected an object");
  EXPECT_THAT(error_of([&] { json.integer("i", 4, 5); }), "i 3 is outside [4, 5]");
}

TEST(JsonInput, DocumentsThatAreRefused) {
  const auto error = [](const std::string& text) {
    return error_of([&] { JsonDocument(text, 16).root(); });
  };
  EXPECT_EQ(error("[1]"), "the body is a list; expected an object");
  EXPECT_EQ(error("{\"a\": 1, \"a\": 2}"), "a is given twice");
  EXPECT_EQ(error("{\"top_p\": 1e999}"),
            "the body is no JSON that is taken: top_p: 1e999, a number beyond doubles, at byte 10");
  EXPECT_THAT(error(""), HasSubstr("the body is no JSON"));
  EXPECT_THAT(error("{\"a\":" + std::string(100'000, '[')), HasSubstr("nested deeper than"));
  EXPECT_THAT(error(std::string(100'000, '{')), HasSubstr("the body is no JSON"));
  // A number beyond 64 bits, then depth: no reader that recurses sees it.
  EXPECT_THAT(error("{\"a\": [123456789012345678901234567890," + std::string(1'000'000, '[')),
              HasSubstr("a[0]: 123456789012345678901234567890, an integer beyond 64 bits"));
}

}  // namespace
}  // namespace megatron
