#!/usr/bin/env bash
# Numbers and figures of one GPU, within 8 minutes: see gpu_check.py. Needs no installation of hydraflow.
#
#   bash scripts/gpu_check.sh [--device cpu --size small]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec timeout 480 "${PYTHON:-python3}" scripts/gpu_check.py "$@"
