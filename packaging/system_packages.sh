# What the machine itself must bring: a Python and, on Linux, the compiler packages that libp2p's
# fastecdsa is built with. Sourced by install.sh and test.sh; runs nothing by itself. POSIX sh.

# Print a message on stderr and stop. Arguments: the lines.
fail() {
  printf '\n' >&2
  printf 'allmende: %s\n' "$@" >&2
  exit 1
}

# Print the first Python 3.11-3.13 that really runs (a version manager's shim may not).
find_python() {
  for candidate in python3 python3.13 python3.12 python3.11; do
    file=$(command -v "$candidate" 2>/dev/null) || continue
    if "$file" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      # sys.executable looks through shims, and through an active virtual environment to its base.
      "$file" -c 'import os, sys; print(getattr(sys, "_base_executable", "") or sys.executable)'
      return 0
    fi
  done
  return 1
}

# Stop with what to do when there is no usable Python.
fail_without_python() {
  found=$(python3 --version 2>/dev/null) || found="no Python at all"
  fail "needs Python 3.11, 3.12 or 3.13; found $found." \
    "Debian 12+, Ubuntu 24.04+: sudo apt-get install python3 python3-venv" \
    "macOS: brew install python@3.13     others: python.org or your package manager"
}

# True if the C compiler accepts the given preprocessor line.
compiles() {
  printf '%s\n' "$1" | gcc -fsyntax-only -x c - 2>/dev/null
}

# Print the packages that PYTHON ($1) still lacks for building and installing, one a line (Debian's names).
missing_packages() {
  version=$("$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  "$1" -c 'import ensurepip, venv' 2>/dev/null || echo "$version-venv"
  case $(uname -s)-$(uname -m) in
    Linux-*) ;;
    Darwin-x86_64) # the only Mac without a wheel of fastecdsa
      compiles '#include <gmp.h>' || echo gmp
      return 0
      ;;
    *) return 0 ;;
  esac
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    echo "$version-dev"
  command -v gcc >/dev/null 2>&1 || echo gcc
  compiles '#include <stdlib.h>' || echo libc6-dev
  compiles '#include <gmp.h>' || echo libgmp-dev
}

# How this user becomes root: "" (is root), "sudo", or status 1 if there is no way.
root_command() {
  [ "$(id -u)" -ne 0 ] || return 0
  command -v sudo >/dev/null 2>&1 || return 1
  if [ -t 0 ]; then echo sudo; elif sudo -n true 2>/dev/null; then echo "sudo -n"; else return 1; fi
}

# Install the Debian packages given as arguments, or stop and say what to do.
install_packages() {
  [ "$(uname -s)" != Darwin ] || fail "install this first:  brew install $*" \
    "and let the compiler find it:" '  export CPATH="$(brew --prefix)/include" LIBRARY_PATH="$(brew --prefix)/lib"' \
    "then run the same command again."
  command -v apt-get >/dev/null 2>&1 || fail "this system has no apt-get; install these yourself:" \
    "  $*" "(Fedora: gcc python3-devel gmp-devel; Arch: gcc gmp; openSUSE: gcc python3-devel gmp-devel)" \
    "then run the same command again."
  as_root=$(root_command) || fail "root is needed to install $*," \
    "and there is no sudo that works here without a password prompt. As root, run:" \
    "  apt-get update && apt-get install -y $*" "then run the same command again."
  # shellcheck disable=SC2086  # as_root is zero, one or two words on purpose
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q ||
    echo "allmende: the package lists could not be refreshed; trying with the old ones" >&2
  # shellcheck disable=SC2086
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" ||
    fail "apt-get could not install $*." "Is the network there? Its own message is above." \
      "Nothing else was changed; run the same command again."
}
