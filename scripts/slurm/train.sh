#!/usr/bin/env bash
# The training itself, on the first node, once Ray runs on all of them. Arguments: those of the run. Hands on the job's request to save,
# ends with the training's exit code, and copies its request to be requeued.
set -euo pipefail

folder="$HYDRAFLOW_JOB_FOLDER"
# shellcheck source=/dev/null
source "$folder/facts"
export PYTHONUNBUFFERED=1
export HYDRAFLOW_ALL_NODES_JOINED=1 # a node that is gone now does not come back: the run ends at once, and the job is put back

words=("$@" "ray_init.address=$(<"$folder/address")")
# quoted for Hydra: a folder may have a comma or brackets in its name
[[ -z "$HF_RUN_FOLDER" ]] || words+=("trainer.default_local_dir='${HF_RUN_FOLDER//\'/\\\'}'")
# the job goes back into the queue with the same arguments, and must not start from scratch each time
[[ "${HF_GOES_ON:-0}" == 0 ]] || words+=("trainer.resume_mode=auto")

# Ignored until the training listens: Python does nothing about a signal that was ignored when it started.
(
    trap '' USR1
    exec "$HYDRAFLOW_PYTHON" -m "$HYDRAFLOW_MODULE" "${words[@]}"
) &
training=$!

# Whatever ends this script ends the training. It has a few seconds: when Slurm ends a job its workers are gone already.
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
    # again and again: the first may come before the training listens, and only the first that it hears counts
    [[ ! -e "$folder/signal" ]] || kill -USR1 "$training" 2>/dev/null || true
    sleep 1 || true
done
code=0
wait "$training" || code=$?
[[ -z "$HF_RUN_FOLDER" || ! -e "$HF_RUN_FOLDER/requeue" ]] || cp "$HF_RUN_FOLDER/requeue" "$folder/requeue"
exit "$code"
