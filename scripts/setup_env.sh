# shellcheck shell=bash
# Makes the Python environment that the other scripts use. Sourced by them, not run:
#
#   source scripts/setup_env.sh; prepare_environment ""      what a run needs
#   source scripts/setup_env.sh; prepare_environment dev     besides that, what the tests need
#
# It sets $PYTHON. The environment is .venv in the clone, or $HYDRAFLOW_VENV. What was installed before is used again as long as
# setup.py, pyproject.toml and constraints.txt are the same.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HYDRAFLOW_VENV:-$ROOT/.venv}"
CPU_WHEELS="https://download.pytorch.org/whl/cpu"  # PyTorch's public index
TORCH_VERSION="$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")"

say() { printf '[hydraflow] %s\n' "$*"; }

fail() {
    printf '[hydraflow] %s\n' "$*" >&2
    exit 2
}

# The first command that really is Python 3.11 or 3.12 (a version manager's stand-in may exist and not run).
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        return
    fi
    if [[ -d "$VENV" && ! -e "$VENV/pyvenv.cfg" && -n "$(ls -A "$VENV")" ]]; then
        fail "$VENV is a folder with other things in it, no Python environment. Set HYDRAFLOW_VENV to another folder."
    fi
    local base
    base="$(find_python)" || fail "no Python 3.11 or 3.12 with venv was found (tried python3.11, python3.12, python3). \
On Debian and Ubuntu: apt install python3.11 python3.11-venv"
    say "making $VENV with $base ($("$base" -V)); a few seconds"
    "$base" -m venv "$VENV"
    rm -f "$VENV/hydraflow-installed"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# torch goes first and by itself. Without a GPU the wheel is asked for by its full name, so that pip cannot choose the CUDA
# build, which is 20 times larger. It is looked for where pip looks anyhow, then also at $HYDRAFLOW_TORCH_INDEX, by default
# PyTorch's own index of CPU wheels. Where neither has it, the plain package does the same, only larger.
install_torch() {
    if "$PYTHON" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
        return
    fi
    if has_gpu; then
        say "installing torch $TORCH_VERSION with CUDA; about 3 GB, some minutes"
        "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION"
    else
        say "installing torch $TORCH_VERSION for CPUs; about 200 MB, a minute or two"
        install_cpu_torch || {
            say "pip finds no CPU build of torch $TORCH_VERSION, neither in its own index nor at ${HYDRAFLOW_TORCH_INDEX:-$CPU_WHEELS}"
            say "installing the plain torch $TORCH_VERSION instead; with CUDA libraries that is about 3 GB, some minutes"
            "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION" ||
                fail "pip cannot install torch $TORCH_VERSION. Is the network reachable, and are there 6 GB of free disk? \
Set HYDRAFLOW_TORCH_INDEX to an index or PIP_FIND_LINKS to a folder that has its wheel, and run this again."
        }
    fi
}

install_cpu_torch() {
    if [[ -z "${HYDRAFLOW_TORCH_INDEX:-}" ]] && "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION+cpu" 2>/dev/null; then
        return
    fi
    # a network without that index is given up after seconds, not after pip's five attempts
    "$PYTHON" -m pip install --quiet --retries 1 --timeout 15 --extra-index-url "${HYDRAFLOW_TORCH_INDEX:-$CPU_WHEELS}" \
        "torch==$TORCH_VERSION+cpu"
}

fingerprint() {
    (cd "$ROOT" && { pwd && cat setup.py pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1)
}

# $1: extras, "" or dev. The stamp holds a fingerprint and the extras that were installed with it.
prepare_environment() {
    local extras="$1" stamp="$VENV/hydraflow-installed" now started=$SECONDS
    now="$(fingerprint)"
    make_venv
    PYTHON="$VENV/bin/python"
    if [[ -f "$stamp" ]] && [[ "$(<"$stamp")" == "$now $extras" || "$(<"$stamp")" == "$now dev" ]]; then
        say "using $VENV"
        return
    fi
    rm -f "$stamp" # an installation that is interrupted leaves no stamp of an earlier one
    install_torch
    say "installing hydraflow${extras:+ with [$extras]} and what it needs into $VENV; about 300 MB the first time (with [dev] 400), one to five minutes"
    "$PYTHON" -m pip install --quiet --constraint "$ROOT/constraints.txt" --editable "$ROOT${extras:+[$extras]}"
    printf '%s %s\n' "$now" "$extras" >"$stamp"
    say "the environment is ready after $((SECONDS - started)) s"
}
