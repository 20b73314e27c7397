#!/usr/bin/env bash
# From a fresh clone to a trained model: creates the environment, then runs `python -m hydraflow.main_ppo`
# with your overrides.
#
#   scripts/quickstart.sh                                     the arithmetic recipe, minutes on a laptop CPU
#   scripts/quickstart.sh trainer.total_training_steps=20     a short one
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

prepare_environment ""
say "training: python -m hydraflow.main_ppo $*"
say "the run folder is created in $PWD/runs unless trainer.default_local_dir is set"
exec "$PYTHON" -m hydraflow.main_ppo "$@"
