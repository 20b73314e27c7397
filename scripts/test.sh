#!/usr/bin/env bash
# Checks the project: ruff, formatting, mypy, pytest; all of them, even if one fails. Arguments go to pytest.
#
#   scripts/test.sh                       everything
#   scripts/test.sh --fast                without tests that use Ray or several ranks, train, or wait for
#                                         other programs: three minutes on two cores
#   scripts/test.sh -n 0 --pdb FILE       in one process, with the debugger
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

prepare_environment dev
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests' tensors are too small for threads to help
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}" # spinning threads would take the cores from other tests
unset PYTHONDONTWRITEBYTECODE                   # else every process would recompile the package and its tests
cd "$ROOT"
failed=()

check() { # name, how long it takes, command
    local name="$1" started=$SECONDS
    say "$name ($2)"
    shift 2
    if "$@"; then
        say "$name passed after $((SECONDS - started)) s"
    else
        say "$name FAILED after $((SECONDS - started)) s"
        failed+=("$name")
    fi
}

types() { # waits for mypy, which runs beside the tests, and prints its output
    wait "$mypy"
    local code=$?
    cat "$mypy_says"
    return $code
}

check ruff "a second" "$PYTHON" -m ruff check .
check formatting "a second" "$PYTHON" -m ruff format --check .
mypy_says="$(mktemp)"
"$PYTHON" -m mypy >"$mypy_says" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$mypy_says"' EXIT
# Three processes on two cores: most slow tests wait for processes of their own. Each takes a file at a time.
check pytest "some minutes" "$PYTHON" -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder "$@"
check mypy "beside the tests" types

if ((${#failed[@]})); then
    fail "failed: ${failed[*]}"
fi
say "all checks passed"
