// Character classes and lower case of Python's str and re, for what must agree with Python code.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

enum PythonClass : uint8_t {
  kPythonSpace = 1,         // \s, and what str.rstrip() removes
  kPythonWord = 2,          // \w
  kPythonDigit = 4,         // \d
  kPythonUpper = 8,         // isupper()
  kPythonLower = 16,        // islower()
  kPythonSigmaCased = 32,   // before or after a sigma, decides whether it is a final one
  kPythonSigmaIgnored = 64  // looked through in doing so
};

// The PythonClass bits of each code point, 1.1 MB, built at the first call.
const uint8_t* python_classes();

// Appends the lower case of well-formed UTF-8, as str.lower() gives it.
void append_python_lower(std::string_view text, std::string& out);

}  // namespace megatron
