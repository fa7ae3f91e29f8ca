#!/bin/sh
# Install allmende for this user:  sh packaging/install.sh [--yes] [--no-start] | --uninstall
# Safe to run again: what is there stays, and the program is replaced by this checkout's.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
checkout=$(dirname -- "$here")
# shellcheck source=packaging/system_packages.sh
. "$here/system_packages.sh"

OLDEST_PIPX=1.4          # older ones do not replace an installed program by a local folder
STOP_DEADLINE_S=60       # agents save their work first
NEEDED_KIB=2097152       # measured: 1.1 GiB installed plus the downloads, with a CPU build of PyTorch
NEEDED_KIB_CUDA=10485760 # 5.6 GiB installed plus the downloads, with PyTorch's CUDA libraries

usage() {
  cat <<'USAGE'
Usage: sh packaging/install.sh [--yes] [--no-start]
       sh packaging/install.sh --uninstall

  --yes        do not ask, even at a terminal
  --no-start   do not open the dashboard at the end, which starts contributing once you agree
  --uninstall  stop every agent and remove the program; what it stored stays, and it says where
USAGE
}

# Status 0 if the version $1 ("1.18.4") is not older than OLDEST_PIPX.
is_new_enough() {
  printf '%s\n' "$1" | awk -F. -v oldest="$OLDEST_PIPX" \
    '{ split(oldest, o, "."); exit !($1 > o[1] || ($1 == o[1] && $2 + 0 >= o[2])) }'
}

# Print the pipx to use, if a usable one is here: the user's own, else our private one.
find_pipx() {
  for candidate in pipx "$private_pipx/bin/pipx"; do
    file=$(command -v "$candidate" 2>/dev/null) || continue
    version=$("$file" --version 2>/dev/null) || continue
    if is_new_enough "$version"; then
      printf '%s\n' "$file"
      return 0
    fi
  done
  return 1
}

# Status 0 if the distribution has a usable pipx and we may install it.
has_packaged_pipx() {
  command -v apt-cache >/dev/null 2>&1 && root_command >/dev/null || return 1
  version=$(LC_ALL=C apt-cache policy pipx 2>/dev/null | sed -n 's/^ *Candidate: *//p')
  is_new_enough "${version:-0.0}"
}

# Install pipx into a folder of our own: no change to the system's Python, no root.
make_private_pipx() {
  rm -rf -- "$private_pipx"
  "$python" -m venv "$private_pipx" || fail "could not make a Python environment in $private_pipx."
  "$private_pipx/bin/pip" install --quiet --disable-pip-version-check "pipx>=$OLDEST_PIPX" || {
    rm -rf -- "$private_pipx"
    fail "could not download pipx." "Is the network there? pip's own message is above." \
      "Run the same command again when it is."
  }
}

# The environment that pipx keeps for allmende, if there is one.
allmende_venv() {
  venv=$("$pipx" environment --value PIPX_LOCAL_VENVS 2>/dev/null)/allmende
  [ -d "$venv" ] && printf '%s\n' "$venv"
}

# Ask or tell the agents that run from the installed program, whatever their folders are (the
# arguments are stop_agents.py's). Prints nothing where none is installed.
agents() {
  [ -n "$pipx" ] && venv=$(allmende_venv) || return 0
  runner=$venv/bin/python
  "$runner" -c '' 2>/dev/null || runner=$(find_python) ||
    fail "no Python runs here that could look for running agents; nothing was changed."
  "$runner" -I "$here/stop_agents.py" "$@" "$venv"
}

stop_agents() {
  agents --deadline-s "$STOP_DEADLINE_S" ||
    fail "an agent did not stop; the program stays as it is."
}

check_disk() {
  needed=$NEEDED_KIB
  if command -v nvidia-smi >/dev/null 2>&1; then needed=$NEEDED_KIB_CUDA; fi
  free=$(df -Pk -- "$HOME" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$needed" ] || fail "needs $((needed / 1048576)) GiB free in $HOME;" \
    "there are $((free / 1048576)) GiB. Free some space and run the same command again."
}

say_plan() {
  echo "Allmende: lend your idle GPU to train an open model."
  echo
  echo "This will, with $python:"
  if [ -n "$packages" ]; then echo "  - install these packages of your system: $packages"; fi
  case $pipx_plan in
    present) echo "  - use $pipx" ;;
    system) echo "  - install your system's pipx" ;;
    private) echo "  - put pipx into $private_pipx" ;;
  esac
  running=$(agents --list)
  if [ -n "$running" ]; then
    echo "  - stop the agents that run (they save their work; they are not started again by this):"
    printf '%s\n' "$running" | sed 's/^/      /'
  fi
  echo "  - build and install the program from $checkout"
  echo "    (with PyTorch: 1 GiB on disk; about 6 GiB where PyTorch brings its CUDA libraries)"
  echo "  - add the folder of the command 'allmende' to your PATH, if it isn't there"
  if [ "$is_starting" = yes ]; then
    echo "  - open the dashboard at the end; it says what it uses, and starts when you agree (not with --no-start)"
  else
    echo "Nothing contributes before you start it."
  fi
  echo "To undo: sh '$here/install.sh' --uninstall"
  echo
}

confirm() {
  [ "$is_asking" = yes ] || return 0
  printf 'Go on? [Y/n] '
  read -r answer || answer=n
  case $answer in
    '' | [Yy]*) ;;
    *) fail "nothing was changed." ;;
  esac
}

# Print which Python a python file is ("3.11.7 /usr"), or status 1 if it does not run.
base_of() {
  "$1" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)' 2>/dev/null
}

# An environment whose Python was upgraded or removed is made anew: pip in it would run no more.
remove_stale_venv() {
  if venv=$(allmende_venv) && [ "$(base_of "$venv/bin/python")" != "$(base_of "$python")" ]; then
    echo "The installed program used another Python; installing it anew."
    "$pipx" uninstall allmende >/dev/null || rm -rf -- "$venv"
  fi
}

install_program() {
  stop_agents
  remove_stale_venv
  bin_dir=$("$pipx" environment --value PIPX_BIN_DIR)
  # By the environment, since pipx takes no --python together with --force. With bin_dir on PATH it
  # does not advise what check_path does.
  (cd / && PIPX_DEFAULT_PYTHON=$python PATH="$bin_dir:$PATH" "$pipx" install --force "$checkout") || fail \
    "the program could not be installed; the message above says why." \
    "Most often the network or the disk's space is missing. What was downloaded is kept:" \
    "run the same command again."
  "$bin_dir/allmende" --help >/dev/null || fail "the program is installed but does not start:" \
    "  $bin_dir/allmende --help" "shows why."
}

check_path() {
  case ":$PATH:" in *":$bin_dir:"*) return 0 ;; esac
  "$pipx" ensurepath >/dev/null || true
  echo
  echo "The command 'allmende' is in $bin_dir, which this terminal does not search yet."
  echo "Open a new terminal, or:  export PATH=\"$bin_dir:\$PATH\""
}

finish() {
  if [ "$is_starting" = yes ]; then
    echo
    echo "Opening the dashboard: it says what it uses, and starts when you press Enter. Later: 'allmende'. To undo: sh '$here/install.sh' --uninstall"
    exec "$bin_dir/allmende"
  fi
  echo
  echo "Done. Next:"
  echo "  allmende          the dashboard; says what it uses, and starts contributing when you agree"
  echo "  allmende start    without a terminal;  allmende status  and  allmende stop  then"
}

remove_private_pipx() {
  # pipx's own pip goes too, unless other programs were installed with it.
  if [ -z "$("$pipx" list --short 2>/dev/null)" ]; then
    rm -rf -- "$("$pipx" environment --value PIPX_SHARED_LIBS)"
  fi
  rm -rf -- "$private_pipx"
}

# Print where this user's volunteers keep what is theirs (volunteer/locations.py), a line each.
data_places() {
  if [ -n "${ALLMENDE_HOME:-}" ]; then printf '%s\n' "$ALLMENDE_HOME"; fi
  if [ "$(uname -s)" = Darwin ]; then
    printf '%s\n' "$HOME/Library/Application Support/allmende" "$HOME/Library/Logs/allmende"
  else
    printf '%s\n' "${XDG_DATA_HOME:-$HOME/.local/share}/allmende" \
      "${XDG_CONFIG_HOME:-$HOME/.config}/allmende" "${XDG_STATE_HOME:-$HOME/.local/state}/allmende"
  fi
}

say_what_stays() {
  kept=$({
    data_places
    printf '%s\n' "$1"
  } | sort -u | while read -r place; do
    if [ -n "$place" ] && [ -e "$place" ]; then echo "  $place"; fi
  done)
  if [ -n "$kept" ]; then
    echo "Kept, since it is yours (identity, statistics, checkpoints, settings, logs); delete it to be rid of it:"
    printf '%s\n' "$kept"
    echo "and any other folder that you named with ALLMENDE_HOME."
  fi
}

# A service whose program is gone would fail at each login.
remove_services() {
  runner=$(find_python) || return 0
  "$runner" -I "$here/remove_services.py" || fail "the program stays as it is."
}

uninstall() {
  remove_services
  folders=
  if pipx=$(find_pipx) && allmende_venv >/dev/null; then
    folders=$(agents --folders)
    stop_agents
    "$pipx" uninstall allmende
  else
    echo "allmende is not installed."
  fi
  if [ "$pipx" = "$private_pipx/bin/pipx" ]; then remove_private_pipx; fi
  say_what_stays "$folders"
  echo "Kept: the system's packages, and the line that pipx wrote to your shell's profile (ensurepath)."
}

is_asking=no
is_starting=no
if [ -t 0 ] && [ -t 1 ]; then is_asking=yes; fi
if [ -t 0 ] && [ -t 1 ] && [ -t 2 ]; then is_starting=yes; fi
action=install
for argument in "$@"; do
  case $argument in
    --yes | -y) is_asking=no ;;
    --no-start) is_starting=no ;;
    --uninstall) action=uninstall ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      printf 'allmende: unknown option: %s\n' "$argument" >&2
      usage >&2
      exit 2
      ;;
  esac
done

[ -n "${HOME:-}" ] || fail "HOME is not set; it names the folder to install into."
# uv, if pipx finds it, ignores pip's settings (index, proxy, local wheels); the user may still ask for it.
export PIPX_DEFAULT_BACKEND="${PIPX_DEFAULT_BACKEND:-pip}"
private_pipx=${XDG_DATA_HOME:-$HOME/.local/share}/allmende-installer

if [ "$action" = uninstall ]; then
  uninstall
  exit 0
fi

python=$(find_python) || fail_without_python
packages=$(missing_packages "$python" | tr '\n' ' ')
pipx=$(find_pipx) || pipx=
pipx_plan=private
if [ -n "$pipx" ]; then pipx_plan=present; elif has_packaged_pipx; then pipx_plan=system; fi

check_disk
say_plan
confirm
# shellcheck disable=SC2086  # a list of package names
if [ -n "$packages" ]; then install_packages $packages; fi
case $pipx_plan in
  system) install_packages pipx ;;
  private) make_private_pipx ;;
esac
pipx=$(find_pipx) || fail "pipx is installed but does not run; the message of 'pipx --version' says why."
install_program
check_path
finish
