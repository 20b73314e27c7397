#!/usr/bin/env bash
# Checks one GPU's numbers and measures its speed, within 8 minutes: see gpu_check.py. hydraflow need not be
# installed.
#
#   bash scripts/gpu_check.sh [--device cpu --size small]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec timeout 480 "${PYTHON:-python3}" scripts/gpu_check.py "$@"
