# shellcheck shell=bash
# Creates the Python environment of the other scripts. Sourced by them, not run:
#
#   source scripts/setup_env.sh; prepare_environment ""      dependencies of a run
#   source scripts/setup_env.sh; prepare_environment dev     also those of the tests
#
# Sets $PYTHON. The environment is .venv in the clone, or $HYDRAFLOW_VENV. It is reused as long as setup.py,
# pyproject.toml and constraints.txt are unchanged.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HYDRAFLOW_VENV:-$ROOT/.venv}"
CPU_WHEELS="https://download.pytorch.org/whl/cpu"  # PyTorch's public index
TORCH_VERSION="$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")"

say() { printf '[hydraflow] %s\n' "$*"; }

fail() {
    printf '[hydraflow] %s\n' "$*" >&2
    exit 2
}

# Prints the first command that runs as Python 3.11 or 3.12 (a version manager's shim may exist but not run).
find_python() {
    local check='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
    local candidate
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c "$check" 2>/dev/null; then
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
        fail "$VENV is not empty and not a Python environment. Set HYDRAFLOW_VENV to another folder."
    fi
    local base
    base="$(find_python)" ||
        fail "found no Python 3.11 or 3.12 with venv (tried python3.11, python3.12, python3)." \
            "On Debian and Ubuntu: apt install python3.11 python3.11-venv"
    say "creating $VENV with $base ($("$base" -V)); a few seconds"
    "$base" -m venv "$VENV"
    rm -f "$VENV/hydraflow-installed"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# torch is installed first, by itself. Without a GPU, its full version (+cpu) keeps pip from choosing the CUDA
# build, which is 20 times larger. pip's own index is tried first, then also $HYDRAFLOW_TORCH_INDEX, by
# default PyTorch's index of CPU wheels. If neither has it, the plain package works as well, but is larger.
install_torch() {
    local found="from importlib.metadata import version; found = version('torch').split('+')[0]"
    if "$PYTHON" -c "$found; raise SystemExit(found != '$TORCH_VERSION')" 2>/dev/null; then
        return
    fi
    if has_gpu; then
        say "installing torch $TORCH_VERSION with CUDA; about 3 GB, a few minutes"
        "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION"
    else
        say "installing torch $TORCH_VERSION for CPUs; about 200 MB, a minute or two"
        install_cpu_torch || {
            say "pip finds no CPU build of torch $TORCH_VERSION, neither in its own index nor at" \
                "${HYDRAFLOW_TORCH_INDEX:-$CPU_WHEELS}"
            say "installing plain torch $TORCH_VERSION instead; with CUDA libraries about 3 GB, a few minutes"
            "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION" ||
                fail "pip cannot install torch $TORCH_VERSION. Is the network reachable," \
                    "and are 6 GB of disk free?" \
                    "Set HYDRAFLOW_TORCH_INDEX to an index or PIP_FIND_LINKS to a folder with its wheel," \
                    "and run this again."
        }
    fi
}

install_cpu_torch() {
    if [[ -z "${HYDRAFLOW_TORCH_INDEX:-}" ]] &&
        "$PYTHON" -m pip install --quiet "torch==$TORCH_VERSION+cpu" 2>/dev/null; then
        return
    fi
    # fails within seconds where the index is unreachable; pip would try five times
    "$PYTHON" -m pip install --quiet --retries 1 --timeout 15 \
        --extra-index-url "${HYDRAFLOW_TORCH_INDEX:-$CPU_WHEELS}" "torch==$TORCH_VERSION+cpu"
}

fingerprint() {
    (cd "$ROOT" && { pwd && cat setup.py pyproject.toml constraints.txt; } | sha256sum | cut -d' ' -f1)
}

# $1: extras, "" or dev. The stamp file holds the fingerprint and the extras of the installation.
prepare_environment() {
    local extras="$1" stamp="$VENV/hydraflow-installed" now started=$SECONDS
    now="$(fingerprint)"
    make_venv
    PYTHON="$VENV/bin/python"
    if [[ -f "$stamp" ]] && [[ "$(<"$stamp")" == "$now $extras" || "$(<"$stamp")" == "$now dev" ]]; then
        say "using $VENV"
        return
    fi
    rm -f "$stamp" # or an interrupted installation would look complete
    install_torch
    say "installing hydraflow${extras:+ with [$extras]} and its dependencies into $VENV;" \
        "about 300 MB the first time (with [dev] 400), one to five minutes"
    "$PYTHON" -m pip install --quiet --constraint "$ROOT/constraints.txt" \
        --editable "$ROOT${extras:+[$extras]}"
    printf '%s %s\n' "$now" "$extras" >"$stamp"
    say "the environment is ready after $((SECONDS - started)) s"
}
