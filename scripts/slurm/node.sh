#!/usr/bin/env bash
# One node's part of a job; srun starts it once on every node. Starts Ray, and stops exactly that Ray. On the
# first node it also checks the run against the allocation, waits until all nodes have joined, and trains.
# Arguments: those of the run.
set -euo pipefail

folder="$HYDRAFLOW_JOB_FOLDER"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name="${SLURMD_NODENAME:-$(hostname)}"
# Holds Ray's sockets, so the path must be short and on a local disk.
temporary="${HYDRAFLOW_NODE_TMP:-/tmp}/hydraflow-$UID/$SLURM_JOB_ID"
ray="" training=""

hydraflow_slurm() { "$HYDRAFLOW_PYTHON" -m hydraflow.slurm "$@"; }

keep_logs() {
    local logs
    logs="$(find "$temporary" -maxdepth 2 -name logs -type d 2>/dev/null | head -n 1)"
    [[ -z "$logs" ]] || cp -r "$logs" "$folder/ray-logs-$name" 2>/dev/null || true
}

# Stops a process that this script started. Its children go with it: it stops them itself, and if it cannot,
# Ray's reaper does.
end() { # pid, seconds
    local left=$(($2 * 2))
    kill -TERM "$1" 2>/dev/null || return 0
    while ((left-- > 0)); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.5 || true
    done
    kill -KILL "$1" 2>/dev/null || true
}

leave() {
    local code=$?
    trap '' TERM INT
    [[ -z "$training" ]] || end "$training" 7
    [[ -z "$ray" ]] || end "$ray" 10
    ((code == 0)) || keep_logs
    # processes that are just ending may still write to it
    rm -rf "$temporary" 2>/dev/null || { sleep 2 && rm -rf "$temporary"; } || true
}

start_ray() {
    # not by hydraflow_slurm: $! would be the pid of a subshell, not Ray's
    "$HYDRAFLOW_PYTHON" -m hydraflow.slurm start "$folder" "$temporary" >"$temporary/ray.log" 2>&1 &
    ray=$!
}

# The first node's part.
lead() {
    local code=0
    hydraflow_slurm check "$folder" "${HYDRAFLOW_MODULE#hydraflow.main_}" "$@" || return
    start_ray
    watch_ray &
    hydraflow_slurm await "$folder" || {
        code=$?
        sed 's/^/    /' "$temporary/ray.log" | tail -n 20
        return "$code"
    }
    # in the background: in the foreground, this shell would handle signals only after the training
    bash "$here/train.sh" "$@" &
    training=$!
    wait "$training" || code=$?
    training=""
    if ((code != 0)); then
        hydraflow_slurm lost "$folder" >"$folder/lost" 2>/dev/null || true
    fi
    return "$code"
}

# Reports a Ray that ends before the job does; else the first node would wait for a node that never joins.
watch_ray() {
    local pid=$ray
    while kill -0 "$pid" 2>/dev/null; do sleep 1 || true; done
    [[ -e "$folder/exit_code" ]] && return
    mkdir -p "$folder/failed"
    tail -n 5 "$temporary/ray.log" >"$folder/failed/$name" 2>/dev/null || true
}

# The other nodes' part: waits until the training has ended, or this node's Ray.
follow() {
    start_ray
    watch_ray &
    while kill -0 "$ray" 2>/dev/null; do
        [[ ! -e "$folder/exit_code" ]] || return 0
        sleep 1 || true
    done
    [[ -e "$folder/exit_code" ]] && return
    printf '%s: Ray has ended; its last lines:\n' "$name" >&2
    tail -n 20 "$temporary/ray.log" >&2 || true
    return 1
}

# The path can be guessed: if another user has created the folder, Ray's sockets must not go there.
require_own() { # folder
    mkdir -p "${1%/*}"
    mkdir -m 700 "$1" 2>/dev/null || [[ -d "$1" && ! -L "$1" && -O "$1" ]] && return
    local why="$1 is not a folder of user $UID: another user owns it"
    why+="; set HYDRAFLOW_NODE_TMP to another folder for Ray's files"
    printf '%s: %s\n' "$name" "$why" >&2
    mkdir -p "$folder/failed"
    echo "$why" >"$folder/failed/$name"
    [[ "$SLURM_NODEID" != 0 ]] || echo 3 >"$folder/exit_code"
    exit 3
}

require_own "${temporary%/*}"
trap leave EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
mkdir -p "$temporary"
chmod 700 "${temporary%/*}" "$temporary"
if [[ "$SLURM_NODEID" == 0 ]]; then
    code=0
    lead "$@" || code=$?
    echo "$code" >"$folder/exit_code"
    exit "$code"
fi
follow
