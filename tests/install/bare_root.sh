#!/bin/sh
# bare_root.sh SUITE ROOT DIST: makes a bare root of a distribution and starts the programs of DIST (what `make dist` gives) there:
#
#   tests/install/bare_root.sh trixie /var/tmp/trixie dist        # or bookworm, noble, jammy
#
# As root; needs debootstrap and the network. libtorch is not installed in the root: commands that compute must say so.
set -eu
suite=$1 root=$2 dist=$3
case $suite in
  bookworm | trixie) mirror=http://deb.debian.org/debian ;;
  *) mirror=http://archive.ubuntu.com/ubuntu ;;
esac
script=/usr/share/debootstrap/scripts/$suite
[ -e "$script" ] || script=/usr/share/debootstrap/scripts/gutsy  # newer than this debootstrap: all of Ubuntu's are that one

if [ ! -e "$root/etc/os-release" ]; then
  debootstrap --variant=minbase "$suite" "$root" "$mirror" "$script" >"$root.log" 2>&1 || { tail "$root.log"; exit 1; }
fi
rm -rf "$root/opt/dist"
cp -r "$dist" "$root/opt/dist"
mount -t proc proc "$root/proc"  # the program finds its library by /proc/self/exe
trap 'umount "$root/proc"' EXIT
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin "$@"; }
program=/opt/dist/bin/megatron

. "$root/etc/os-release"
echo "== $PRETTY_NAME"
inside $program --help | grep '^Usage: '
inside $program version
inside $program tokenize --tokenizer-type ByteLevelTokenizer hello
inside sh -c "echo 'some text' >/tmp/a.txt; $program preprocess-data --input /tmp/a.txt --output-prefix /tmp/a \
  --tokenizer-type ByteLevelTokenizer && $program inspect-dataset /tmp/a_text_document --verify"
code=0
inside $program pretrain --help >"$root/tmp/out" 2>&1 || code=$?
cat "$root/tmp/out"
[ $code = 1 ] && grep -q '^error: pretrain needs libtorch' "$root/tmp/out" || { echo "pretrain ended with $code"; exit 1; }
if inside /opt/dist/bin/megatron-run megatron version; then
  echo "megatron-run found a torch package in a root without one"
  exit 1
fi
echo "== $PRETTY_NAME: ok"
