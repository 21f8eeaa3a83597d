#!/bin/sh
# programs_test.sh CMAKE BUILD_DIR TORCH_DIR: installs the programs, moves them, runs one through the launcher.
set -eu
cmake=$1 build=$2 torch=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "$1" >&2; exit 1; }

"$cmake" --install "$build" --component runtime --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/dist"

kib=$(du -sk "$scratch/dist" | cut -f 1)
echo "dist: $kib KiB"
[ "$kib" -lt 40960 ] || fail "dist has $kib KiB; at most 40 MiB"
for name in torch c10 cuda cublas cudnn nccl; do
  ! ls "$scratch/dist/lib/lib$name"* 2>/dev/null || fail "dist/lib holds lib$name, which the torch wheel or the driver provides"
done
if readelf -d "$scratch/dist/bin/megatron" | grep -E 'R(UN)?PATH' | grep -vF '[$ORIGIN/../lib]'; then
  fail "dist/bin/megatron has a run path of this machine"
fi

# Every library outside glibc comes from dist/lib or from the wheel.
missing=$(LD_LIBRARY_PATH=$torch/lib ldd "$scratch/dist/bin/megatron" | sed -n 's/^[[:space:]]*\(lib[^ ]*\) => \(.*\) (0x.*/\1 \2/p' |
  grep -vE "^lib(c|m|dl|rt|pthread|util|cudart|cupti)\.so| ($scratch/dist/|$torch)" || true)
[ -z "$missing" ] || fail "not in dist/lib: $missing"

cd /
MEGATRON_TORCH_DIR=$torch "$scratch/dist/bin/megatron-run" megatron version
if MEGATRON_TORCH_DIR=$scratch "$scratch/dist/bin/megatron-run" megatron version 2>"$scratch/error"; then
  fail "the launcher accepted a folder that holds no torch"
fi
grep -q '^error: .*expected 2.11.0' "$scratch/error" || fail "unexpected message: $(cat "$scratch/error")"
