#!/bin/sh
# library_test.sh CMAKE BUILD_DIR COMPILER: installs the library elsewhere, moves it, builds the examples on it alone.
set -eu
cmake=$1 build=$2 compiler=$3
source=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$cmake" --install "$build" --component library --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"
for example in custom_loop serve_loop; do
  cp -r "$source/examples/$example" "$scratch/$example"
  "$cmake" -G Ninja -S "$scratch/$example" -B "$scratch/build/$example" -DCMAKE_CXX_COMPILER="$compiler" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$scratch/prefix" >"$scratch/configure.log" 2>&1 || {
    cat "$scratch/configure.log"
    exit 1
  }
  "$cmake" --build "$scratch/build/$example"
done
if grep -rlF -e "$source" -e "$build" "$scratch/prefix" --include='*.cmake' | xargs -r grep -nF "$source" | grep -v MEGATRON_TORCH_DIR; then
  echo "the installed CMake files name the source or build folder"
  exit 1
fi
cd "$scratch"
"$scratch/build/custom_loop/custom_loop" "$source/README.md" 5
echo "The cat" | "$scratch/build/serve_loop/serve_loop" "$source/tests/golden/evaluate/model" 4
