#!/bin/sh
# programs_test.sh CMAKE BUILD_DIR TORCH_DIR: installs the programs, moves them, runs one through the launcher, and without
# libtorch what needs none.
set -eu
cmake=$1 build=$2 torch=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "$1" >&2; exit 1; }

"$cmake" --install "$build" --component runtime --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/dist"
program=$scratch/dist/bin/megatron
library=$scratch/dist/lib/libmegatron_compute.so

kib=$(du -sk "$scratch/dist" | cut -f 1)
echo "dist: $kib KiB"
[ "$kib" -lt 40960 ] || fail "dist has $kib KiB; at most 40 MiB"
for name in torch c10 cuda cublas cudnn nccl; do
  ! ls "$scratch/dist/lib/lib$name"* 2>/dev/null || fail "dist/lib holds lib$name, which the torch wheel or the driver provides"
done
readelf -d "$program" | grep -E 'R(UN)?PATH' | grep -qF '[$ORIGIN/../lib]' || fail "the run path of $program is not \$ORIGIN/../lib"
readelf -d "$library" | grep -E 'R(UN)?PATH' | grep -qF '[$ORIGIN]' || fail "the run path of $library is not \$ORIGIN"

# Every library outside glibc comes from dist/lib or from the wheel.
for file in "$program" "$library"; do
  missing=$(LD_LIBRARY_PATH=$torch/lib ldd "$file" | sed -n 's/^[[:space:]]*\(lib[^ ]*\) => \(.*\) (0x.*/\1 \2/p' |
    grep -vE "^lib(c|m|dl|rt|pthread|util|cudart|cupti)\.so| ($scratch/dist/|$torch)" || true)
  [ -z "$missing" ] || fail "$file needs, and dist/lib does not hold: $missing"
done

cd /
run=$scratch/dist/bin/megatron-run
MEGATRON_TORCH_DIR=$torch "$run" megatron version --all
MEGATRON_TORCH_DIR=$torch "$run" megatron pretrain --help >/dev/null
if MEGATRON_TORCH_DIR=$scratch "$run" megatron version 2>"$scratch/error"; then
  fail "the launcher accepted a folder that holds no torch"
fi
grep -q '^error: .*expected 2.11.0' "$scratch/error" || fail "unexpected message: $(cat "$scratch/error")"

# Without libtorch.
env -u LD_LIBRARY_PATH "$program" --help >/dev/null
env -u LD_LIBRARY_PATH "$program" version
env -u LD_LIBRARY_PATH "$program" tokenize --tokenizer-type ByteLevelTokenizer hello >/dev/null
if env -u LD_LIBRARY_PATH "$program" pretrain --help >/dev/null 2>"$scratch/error"; then
  fail "pretrain ran without libtorch"
fi
grep -q '^error: pretrain needs libtorch 2.11.0, which was not found: libtorch' "$scratch/error" || fail "unexpected message: $(cat "$scratch/error")"
grep -q '^hint: pip install torch==2.11.0' "$scratch/error" || fail "no hint: $(cat "$scratch/error")"
