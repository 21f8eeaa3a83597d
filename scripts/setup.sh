#!/usr/bin/env bash
# Installs what a build needs and is missing: packages of the distribution, and .venv with the libtorch wheel.
# A second run only checks. Writes .venv/toolchain.sh (which cmake, which compiler), which scripts/build.sh reads.
#
#   SKIP_APT=1   do not touch the distribution's packages (you have installed their like yourself)
#   MEGATRON_GPU=0|1   overrides the detection of a GPU
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.11.0"
CPU_WHEELS=("nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*")  # all that libtorch_cpu loads of CUDA
ARROW="pyarrow>=20,<27"                                                 # Parquet input; loaded on demand
TYPING="typing-extensions==4.16.0"                                      # all that torchrun needs of Python besides torch (50 kB)
# What torch's Python part names and the CPU set does not hold; see scripts/torchrun.py.
CUDA_NAMES=(libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcufile.so.0 libcurand.so.10 libcusparse.so.12
  libcusparseLt.so.0 libnccl.so.2 libnvshmem_host.so.3)
CUDNN_FRONTEND="nvidia-cudnn-frontend==1.32.*"                          # headers, for builds with CUDA
CUTLASS="nvidia-cutlass==4.2.*"                                         # likewise
LOG=build/setup.log
COMPILER=g++  # find_tools says which

say() { echo "setup: $*"; }
die() {
  echo "error: $1" >&2
  shift
  for line in "$@"; do echo "hint: $line" >&2; done
  exit 1
}

# Runs a command with its output in the log; on failure shows the end of it and stops with the message given first.
quietly() {
  local what=$1
  shift
  echo "+ $*" >>"$LOG"
  if ! "$@" >>"$LOG" 2>&1; then
    tail -n 20 "$LOG" | sed 's/^/  | /' >&2
    die "$what" "the whole output is in $LOG; if it speaks of connections or names, check the network and the proxy settings"
  fi
}

check_machine() {
  local arch
  arch=$(uname -m)
  [ "$arch" = x86_64 ] || die "this machine is $arch; expected x86_64" "libtorch and the kernels are built for x86-64 alone so far"
  grep -qw avx2 /proc/cpuinfo || die "this processor has no AVX2; expected an x86-64-v3 one (2013 or later)"
  . /etc/os-release
  SYSTEM="${ID:-unknown} ${VERSION_ID:-}"
  case "$SYSTEM" in
    "debian 12" | "debian 13" | "ubuntu 22.04" | "ubuntu 24.04") ;;
    *) [ "${SKIP_APT:-}" = 1 ] || die "unsupported distribution: $SYSTEM; expected Debian 12 or 13, Ubuntu 22.04 or 24.04" \
      "install the likes of these yourself and run again with SKIP_APT=1: $(apt_packages)" ;;
  esac
}

apt_packages() {
  echo git make pkg-config ninja-build ccache python3 python3-venv \
    nlohmann-json3-dev libsimdjson-dev libyaml-cpp-dev zlib1g-dev libzstd-dev \
    libpcre2-dev libutf8proc-dev libxxhash-dev libboost-dev libssl-dev libgtest-dev libgmock-dev libgloo-dev
  case "$SYSTEM" in
    "ubuntu 22.04") echo g++-12 ;;  # its g++ is 11 and its cmake 3.22: cmake comes from PyPI, its mold is too old
    *) echo g++ cmake mold ;;
  esac
}

# Images and sound: a build without them works, and does not read these.
MEDIA_PACKAGES=(libjpeg-dev libpng-dev libwebp-dev libsndfile1-dev)

# Runs as root.
privileged() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

# Those of the packages named that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || echo "$package"
  done
}

install_packages() {
  local missing
  # shellcheck disable=SC2046
  mapfile -t missing < <(missing_packages $(apt_packages))
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${#missing[@]} packages: ${missing[*]}"
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "packages are missing and this is neither root nor is there sudo" \
      "as root: apt-get install ${missing[*]}"
    sudo -n true 2>/dev/null || [ -t 0 ] || die "packages are missing and sudo asks for a password, but there is no terminal" \
      "sudo apt-get install ${missing[*]}"
    sudo true || die "sudo was refused" "as root: apt-get install ${missing[*]}"
  fi
  quietly "apt-get update failed" privileged apt-get update
  quietly "apt-get install failed" privileged env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

# Never asks and never fails; what could not be installed is not tried again before `make clean`.
install_media_packages() {
  local missing tried=build/media_packages_tried
  mapfile -t missing < <(missing_packages "${MEDIA_PACKAGES[@]}")
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ ! -e $tried ] && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
    say "installing ${#missing[@]} packages for images and sound: ${missing[*]}"
    echo "+ apt-get install ${missing[*]}" >>"$LOG"
    if privileged env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}" >>"$LOG" 2>&1; then return 0; fi
    # The lists of packages may be old.
    if privileged apt-get update >>"$LOG" 2>&1 && privileged env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}" >>"$LOG" 2>&1; then return 0; fi
    touch $tried
  fi
  say "images and sound will not be read: as root, apt-get install ${missing[*]}, then build again"
}

has_gpu() {
  [ "${MEGATRON_GPU:-}" = 0 ] && return 1
  [ "${MEGATRON_GPU:-}" = 1 ] || nvidia-smi -L 2>/dev/null | grep -q GPU
}

has_nvcc() { command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; }

pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# pip with a progress bar on a terminal, with everything in the log otherwise.
pip_install() {
  if [ -t 1 ]; then
    pip install --quiet --progress-bar on "$@" || die "pip install $* failed" "check the network and the free disk space"
  else
    quietly "pip install $* failed" .venv/bin/python -m pip --disable-pip-version-check install "$@"
  fi
}

# Whether the wheels of this set (cpu, gpu) are in place and of the version wanted.
wheels_present() {
  local site name names="libcudart libcupti"
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null) || return 1
  grep -qs "__version__ = '${TORCH#torch==}[+']" "$site/torch/version.py" || return 1
  [ -e "$site/torch/lib/libtorch_cpu.so" ] || return 1
  ls "$site"/pyarrow/libarrow.so* >/dev/null 2>&1 || return 1
  if [ "$1" = gpu ]; then
    names+=" libcublas libcudnn libnccl libnvshmem_host"
    [ -e "$site/typing_extensions.py" ] || return 1
  fi
  for name in $names; do
    ls "$site"/nvidia/*/lib/$name.so* >/dev/null 2>&1 || return 1
  done
}

install_wheels() {
  local set=cpu
  if has_gpu; then set=gpu; fi
  if ! .venv/bin/python -c 'import sys; assert sys.version_info >= (3, 10)' 2>/dev/null; then
    python3 -c 'import sys; assert sys.version_info >= (3, 10)' 2>/dev/null || \
      die "python3 is $(python3 --version 2>&1); expected 3.10 or later"
    say "making .venv"
    rm -rf .venv
    quietly "python3 -m venv failed" python3 -m venv .venv
  fi
  if ! wheels_present $set; then install_libtorch $set; fi
  if has_nvcc; then
    local site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    [ -e "$site/include/cudnn_frontend.h" ] || pip_install --no-deps "$CUDNN_FRONTEND"
    [ -e "$site/cutlass_library/source/include/cutlass/cutlass.h" ] || pip_install --no-deps "$CUTLASS"
  fi
}

install_libtorch() {
  local set=$1 free_gib
  free_gib=$(($(df --output=avail -k . | tail -n 1) / 1048576))
  [ "$free_gib" -ge 6 ] || die "only $free_gib GiB are free here; expected 6 GiB for libtorch and the build"
  say "installing libtorch from PyPI (530 MB, the $set set)"
  pip_install --no-deps "$TORCH" "${CPU_WHEELS[@]}" "$ARROW"
  if [ $set = gpu ]; then
    local nvidia=()
    mapfile -t nvidia < <(.venv/bin/python -c '
from importlib.metadata import requires
for line in requires("torch"):
    # The second row is for torchrun, which is a Python program.
    if line.startswith(("nvidia-", "cuda-toolkit",
                        "filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")):
        print(line.split(";")[0].strip())')
    say "installing what torch names: ${nvidia[*]}"
    pip_install "${nvidia[@]}"
  fi
  wheels_present $set || die "the wheels are installed, but a library of libtorch is missing" "rm -rf .venv and run again"
}

version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# cmake 3.25 or later: the system's, or PyPI's. g++ 12 or later if there is one: CXX, g++, g++-14, g++-13, g++-12.
find_tools() {
  local found cmake=cmake compiler
  found=$(cmake --version 2>/dev/null | sed -n '1s/cmake version //p') || true
  if [ -z "$found" ] || ! version_at_least "$found" 3.25; then
    if [ ! -x .venv/bin/cmake ]; then
      say "installing cmake from PyPI (found: ${found:-none}, needed: 3.25)"
      pip_install "cmake>=3.25,<4"
    fi
    cmake=$PWD/.venv/bin/cmake
  fi
  for compiler in ${CXX:-} g++ g++-14 g++-13 g++-12; do
    found=$("$compiler" -dumpfullversion -dumpversion 2>/dev/null) || continue
    if version_at_least "$found" 12; then break; fi
    found=
  done
  [ -n "${found:-}" ] || die "no C++ compiler found; expected g++ 12 or later" "name one with CXX="
  command -v ninja >/dev/null || die "ninja not found" "install ninja-build"
  COMPILER=$compiler
  printf 'CMAKE=%q\nCTEST=%q\nexport CXX=%q\n' "$cmake" "${cmake%cmake}ctest" "$compiler" >.venv/toolchain.sh
}

# Whether the torchrun of this version was installed, and did start.
torchrun_present() { cmp -s scripts/torchrun.py .venv/lib/torchrun/torchrun.py && [ -x .venv/bin/torchrun ]; }

# torchrun for the CPU set, where CUDA's libraries are empty ones of their names (10 of 13 kB).
install_torchrun() {
  local site name
  if has_gpu; then
    rm -rf .venv/lib/torchrun  # the real ones are there
    return 0
  fi
  if torchrun_present; then return 0; fi
  site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  [ -e "$site/typing_extensions.py" ] || pip_install --no-deps "$TYPING"
  mkdir -p .venv/lib/torchrun
  for name in "${CUDA_NAMES[@]}"; do
    quietly "making .venv/lib/torchrun/$name failed" \
      "$COMPILER" -shared -nostdlib "-Wl,-soname,$name" -x c /dev/null -o ".venv/lib/torchrun/$name"
  done
  { echo "#!$PWD/.venv/bin/python"; cat scripts/torchrun.py; } >.venv/bin/torchrun
  chmod +x .venv/bin/torchrun
  quietly ".venv/bin/torchrun does not start" .venv/bin/torchrun --help
  cp scripts/torchrun.py .venv/lib/torchrun/torchrun.py  # last: what a second run looks at
}

mkdir -p build
check_machine
if [ "${SKIP_APT:-}" != 1 ]; then
  install_packages
  install_media_packages
fi
install_wheels
find_tools
install_torchrun
