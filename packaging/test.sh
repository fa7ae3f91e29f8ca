#!/bin/sh
# Run everything that CI runs, in environments of its own:  sh packaging/test.sh [--full] [SESSION...]
# Without arguments: lint, types, layer rules, documents and all tests but the hours-long ones.
# --full adds those. SESSION is one of noxfile.py's. Nothing outside .nox/ and caches is written,
# except packages of the system that the tests need and that are missing (it says which).
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
# shellcheck source=packaging/system_packages.sh
. "$here/system_packages.sh"
cd -- "$here/.."

sessions=
pytest_arguments=
for argument in "$@"; do
  case $argument in
    --full) pytest_arguments="-- --full" ;;
    -*)
      echo "usage: sh packaging/test.sh [--full] [SESSION...]" >&2
      exit 2
      ;;
    *) sessions="${sessions:---session} $argument" ;;
  esac
done

python=$(find_python) || fail_without_python
packages=$(missing_packages "$python" | tr '\n' ' ')
if [ "$(uname -s)" = Linux ]; then
  command -v git >/dev/null || packages="$packages git"      # the documents' tests ask what is committed
  command -v ip >/dev/null || packages="$packages iproute2"  # system tests: network namespaces
  command -v tmux >/dev/null || packages="$packages tmux"    # system tests: a terminal
  # System tests: desktops without a screen, a bus of our own, and who judges our unit file.
  command -v Xvfb >/dev/null || packages="$packages xvfb"
  command -v xdotool >/dev/null || packages="$packages xdotool"
  command -v sway >/dev/null || packages="$packages sway"
  command -v wtype >/dev/null || packages="$packages wtype"
  command -v dbus-daemon >/dev/null || packages="$packages dbus-daemon"
  command -v systemd-analyze >/dev/null || packages="$packages systemd"
  if [ -n "$pytest_arguments" ]; then
    command -v kwin_wayland >/dev/null || packages="$packages kwin-wayland"  # 81 MB
  fi
fi
# shellcheck disable=SC2086  # a list of package names
if [ -n "${packages# }" ]; then
  echo "allmende: the tests need packages of the system that are missing: $packages"
  install_packages $packages
fi

runner=.nox/runner
if ! "$runner/bin/nox" --version >/dev/null 2>&1; then
  "$python" -m venv --clear "$runner"
  "$runner/bin/pip" install --quiet --disable-pip-version-check 'nox>=2025.5' ||
    fail "could not download nox. Is the network there? pip's own message is above."
fi
# shellcheck disable=SC2086  # words on purpose
exec "$runner/bin/nox" $sessions $pytest_arguments
