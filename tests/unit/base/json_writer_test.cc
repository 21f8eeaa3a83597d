#include "megatron/base/json_writer.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"

namespace megatron {
namespace {

TEST(JsonWriter, WritesNestedValuesOnOneLine) {
  JsonWriter json;
  json.begin_object()
      .member("step", 3)
      .member("loss", 0.1)
      .member("name", "a\"b")
      .member("ok", true);
  json.key("list")
      .begin_array()
      .value(uint64_t{18446744073709551615u})
      .value(int64_t{-1})
      .null()
      .begin_array()
      .end_array();
  json.end_array().key("empty").begin_object().end_object().end_object();
  EXPECT_EQ(json.text(),
            "{\"step\": 3, \"loss\": 0.1, \"name\": \"a\\\"b\", \"ok\": true, "
            "\"list\": [18446744073709551615, -1, null, []], \"empty\": {}}");
}

TEST(JsonWriter, Indents) {
  JsonWriter json(2);
  json.begin_object()
      .member("a", 1)
      .key("b")
      .begin_array()
      .value(1)
      .value(2)
      .end_array()
      .end_object();
  EXPECT_EQ(json.text(), "{\n  \"a\": 1,\n  \"b\": [\n    1,\n    2\n  ]\n}");
}

TEST(JsonWriter, NumbersReadBackEqualAndNonFiniteOnesAreNull) {
  for (const double v : {0.1, 1.0 / 3, 1e300, 5e-324, -0.0, 123456789.0}) {
    JsonWriter json;
    json.value(v);
    EXPECT_EQ(nlohmann::json::parse(json.text()).get<double>(), v);
  }
  JsonWriter json;
  json.begin_array()
      .value(std::numeric_limits<double>::infinity())
      .value(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(json.end_array().text(), "[null, null]");
}

TEST(JsonWriter, AnyBytesBecomeValidJson) {
  EXPECT_EQ(json_quote("\xff"
                       "a\xc3"),
            "\"\xef\xbf\xbd"
            "a\xef\xbf\xbd\"");
  EXPECT_EQ(json_quote(std::string_view("\n\t\x01\0", 4)), "\"\\n\\t\\u0001\\u0000\"");
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random() % 20, ' ');
    for (char& c : bytes) c = static_cast<char>(random());
    const std::string back = nlohmann::json::parse(json_quote(bytes)).get<std::string>();
    EXPECT_TRUE(is_valid_utf8(back));
    if (is_valid_utf8(bytes)) {
      EXPECT_EQ(back, bytes);
    }
  }
}

TEST(JsonWriter, MisuseIsABug) {
  EXPECT_THROW(JsonWriter().key("a"), InternalError);
  EXPECT_THROW(JsonWriter().begin_object().value(1), InternalError);
  EXPECT_THROW(JsonWriter().begin_object().end_array(), InternalError);
  EXPECT_THROW(JsonWriter().begin_array().text(), InternalError);
  EXPECT_THROW(JsonWriter().begin_object().key("a").end_object(), InternalError);
  EXPECT_THROW(JsonWriter().value(1).value(2), InternalError);
  EXPECT_THROW(JsonWriter().text(), InternalError);
}

TEST(Utf8, AcceptsWellFormedTextOnly) {
  for (const char* good : {"", "abc", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_valid_utf8(good)) << good;
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe2\x82", "\xff", "a\xe2\x28\xa1"})
    EXPECT_FALSE(is_valid_utf8(bad)) << bad;
  EXPECT_EQ(decode_utf8("\xf0\x9f\x98\x80", 0).code, 0x1F600u);
  EXPECT_EQ(decode_utf8("a\xe2\x82\xac", 1).code, 0x20ACu);
}

}  // namespace
}  // namespace megatron
