#!/usr/bin/env bash
# scripts/build.sh PRESET [TARGET]...: configures build/PRESET and builds the targets (all of them
# when none is named). UNITY=ON compiles sources in batches, UNITY=OFF each by itself; without it a
# folder stays as it is, and a new one is built in batches, which takes less processor time.
set -euo pipefail
cd "$(dirname "$0")/.."
. .venv/toolchain.sh
preset=$1
shift

unity=${UNITY:-}
case $preset in
  dev | ci | release) [ -n "$unity" ] || [ -e "build/$preset/CMakeCache.txt" ] || unity=ON ;;
esac

# A source that includes ATen takes about 1.5 GiB to compile.
memory_kib=$(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo)
jobs=${JOBS:-$(nproc)}
limit=$((memory_kib / 1572864))
[ "$limit" -ge 1 ] || limit=1
[ "$jobs" -le "$limit" ] || jobs=$limit

mkdir -p "build/$preset"
log=build/$preset/configure.log
if ! "$CMAKE" --preset "$preset" ${unity:+-DMEGATRON_UNITY="$unity"} >"$log" 2>&1; then
  cat "$log" >&2
  echo "error: configuring build/$preset failed" >&2
  exit 1
fi
arguments=()
for target in "$@"; do arguments+=(--target "$target"); done
"$CMAKE" --build "build/$preset" -j "$jobs" "${arguments[@]}"
