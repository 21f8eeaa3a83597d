// Exits with a clear error on a CPU without the instructions this program is built for. Compiled
// for baseline x86-64 and run before all other static constructors, which may already use them.
#include <unistd.h>

#include <cstring>

#if defined(__x86_64__)
namespace {

__attribute__((constructor(101))) void check_cpu() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2"))
    return;
  static const char kMessage[] =
      "error: this CPU lacks AVX2, FMA or BMI2, which this program is built for\n"
      "hint: any x86-64 CPU since Intel Haswell (2013) or AMD Zen (2017) has them; a virtual "
      "machine may hide them\n";
  if (::write(STDERR_FILENO, kMessage, std::strlen(kMessage)) < 0) ::_exit(1);
  ::_exit(1);
}

}  // namespace
#endif
