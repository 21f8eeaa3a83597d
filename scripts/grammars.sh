#!/usr/bin/env bash
# Fetches the source of xgrammar (2.7 MB) from PyPI into .venv, where CMake finds it; its SHA-256 is checked.
set -euo pipefail
cd "$(dirname "$0")/.."

NAME=xgrammar
VERSION=0.2.8
SHA256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80

die() {
  echo "error: $1" >&2
  echo "hint: $2" >&2
  exit 1
}

[ -x .venv/bin/python ] || die "there is no .venv" "make setup makes it"
[ ! -f .venv/$NAME-$VERSION/include/xgrammar/xgrammar.h ] || exit 0
temporary=$(mktemp -d .venv/xgrammar.XXXXXX)
trap 'rm -rf "$temporary"' EXIT
echo "fetching $NAME $VERSION from PyPI" >&2
echo "$NAME==$VERSION --hash=sha256:$SHA256" >"$temporary/requirements.txt"
.venv/bin/python -m pip --quiet --disable-pip-version-check download --no-deps --no-binary $NAME --require-hashes \
  --dest "$temporary" -r "$temporary/requirements.txt" >&2 ||
  die "$NAME $VERSION could not be fetched, or is not the source whose SHA-256 is $SHA256" "check the network and the proxy settings"
tar -xzf "$temporary/$NAME-$VERSION.tar.gz" -C "$temporary" --no-same-owner
# Strings of a bounded length may hold control characters there, which JSON may not.
source=$temporary/$NAME-$VERSION/cpp/json_schema_converter.cc
sed -i "s/{'\\\\r', '\\\\r'}, {'\\\\n', '\\\\n'}}, true)/{0, 0x1f}}, true)/" "$source"
grep -q "{0, 0x1f}}, true)" "$source" || die "the source of $NAME $VERSION has another form than expected" "report this"
mv "$temporary/$NAME-$VERSION" .venv/
