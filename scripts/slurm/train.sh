#!/usr/bin/env bash
# Runs the training on the first node, once Ray is up on all of them. Arguments: those of the run. Forwards
# the job's request to save, exits with the training's exit code, and copies its request to be requeued.
set -euo pipefail

folder="$HYDRAFLOW_JOB_FOLDER"
# shellcheck source=/dev/null
source "$folder/facts"
export PYTHONUNBUFFERED=1
# a node lost from now on does not come back: the run fails at once, and the job is requeued
export HYDRAFLOW_ALL_NODES_JOINED=1

words=("$@" "ray_init.address=$(<"$folder/address")")
# quoted for Hydra: the path may contain commas or brackets
[[ -z "$HF_RUN_FOLDER" ]] || words+=("trainer.default_local_dir='${HF_RUN_FOLDER//\'/\\\'}'")
# a requeued job has the same arguments, and must not start from scratch even with resume_mode=disable
[[ "${HF_RESUMES:-0}" == 0 ]] || words+=("trainer.resume_mode=auto")

# SIGUSR1 is ignored until the training installs its handler: by default it would kill the process.
(
    trap '' USR1
    exec "$HYDRAFLOW_PYTHON" -m "$HYDRAFLOW_MODULE" "${words[@]}"
) &
training=$!

# The training ends with this script. A few seconds are enough: when Slurm ends a job, its workers are gone.
# shellcheck disable=SC2317 # called by a trap
leave() {
    trap '' TERM INT
    kill -TERM "$training" 2>/dev/null || true
    for _ in {1..10}; do
        kill -0 "$training" 2>/dev/null || return 0
        sleep 0.5 || true
    done
    kill -KILL "$training" 2>/dev/null || true
}
trap leave EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

while kill -0 "$training" 2>/dev/null; do
    # repeated: early ones are ignored (see above), and after the first that it handles more change nothing
    [[ ! -e "$folder/signal" ]] || kill -USR1 "$training" 2>/dev/null || true
    sleep 1 || true
done
code=0
wait "$training" || code=$?
[[ -z "$HF_RUN_FOLDER" || ! -e "$HF_RUN_FOLDER/requeue" ]] || cp "$HF_RUN_FOLDER/requeue" "$folder/requeue"
exit "$code"
