# shellcheck shell=bash
# Drives a Slurm job, from its first node. Sourced by the batch script (examples/slurm/ppo.sbatch), which
# sets HYDRAFLOW_PYTHON, HYDRAFLOW_MODULE and HYDRAFLOW_SCRIPTS, then calls run_job with the run's arguments.
#
# Creates a folder for the job with Ray's token, starts node.sh once on every node, forwards signals, waits,
# and stops exactly what it started. Requeues the job if it was asked to stop and has saved, or lost a node.
# The nodes communicate through files in that folder, on a shared file system: runs/slurm/job-<id>/.
#
#   HYDRAFLOW_REQUEUE=0           never requeue the job
#   HYDRAFLOW_MAX_REQUEUES=10     maximum number of requeues
#   HYDRAFLOW_JOB_DIR             parent of the job's folder, on a shared file system; default: runs/slurm
#   HYDRAFLOW_CONTAINER, HYDRAFLOW_CONTAINER_MOUNTS, HYDRAFLOW_NETWORK_INTERFACE: see the batch script
set -euo pipefail

GRACE=20 # seconds for the other nodes to exit on their own
step="" folder=""

tell() { printf '[job %s] %s\n' "$SLURM_JOB_ID" "$*"; }

make_folder() {
    folder="$(realpath -m "${HYDRAFLOW_JOB_DIR:-runs/slurm}")/job-$SLURM_JOB_ID"
    rm -rf "$folder" # left by an earlier start of this job
    mkdir -p "$(dirname "$folder")" # with the user's umask; only the job's own folder is private
    (
        umask 077
        if ! mkdir "$folder"; then # a user who created it in the meantime could read the token
            tell "HYDRAFLOW_JOB_DIR=$(dirname "$folder"): other users can write to it;" \
                "choose a folder of your own" >&2
            exit 3
        fi
        od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$folder/token"
    )
    export HYDRAFLOW_JOB_FOLDER="$folder"
    # Without a token, anyone who reaches Ray's port can run code as this user.
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token"
    unset RAY_AUTH_TOKEN RAY_ADDRESS
}

# Sets `words`: the command that runs node.sh on every node, in a container or not.
build_step() {
    local scripts mounts mounted
    scripts="$(realpath "$HYDRAFLOW_SCRIPTS")"
    if [[ -n "${HYDRAFLOW_CONTAINER:-}" ]]; then
        for mounted in "$PWD" "$folder" "$scripts"; do
            [[ "$mounted" != *[:,]* ]] || {
                tell "$mounted: a container cannot mount a path that contains ':' or ','" >&2
                exit 2
            }
        done
    fi
    mounts="$PWD:$PWD,$folder:$folder,$scripts:$scripts"
    mounts+="${HYDRAFLOW_CONTAINER_MOUNTS:+,$HYDRAFLOW_CONTAINER_MOUNTS}"
    words=(srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
    words+=(--cpu-bind=none --kill-on-bad-exit=0)
    # else srun drops our variables, too, if the job was submitted with --export=NONE
    words+=(--export=ALL)
    # srun does not inherit it from sbatch
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || words+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    case "${HYDRAFLOW_CONTAINER:-}" in
        "") words+=(bash) ;;
        apptainer:*)
            words+=(apptainer exec --bind "$mounts" --pwd "$PWD")
            [[ -z "${SLURM_GPUS_ON_NODE:-}" ]] || words+=(--nv)
            words+=("${HYDRAFLOW_CONTAINER#apptainer:}" bash)
            ;;
        pyxis:*)
            words+=("--container-image=${HYDRAFLOW_CONTAINER#pyxis:}" "--container-mounts=$mounts")
            words+=("--container-workdir=$PWD" bash)
            ;;
        *)
            tell "HYDRAFLOW_CONTAINER=$HYDRAFLOW_CONTAINER: must be apptainer:FILE.sif or pyxis:IMAGE" >&2
            exit 2
            ;;
    esac
    words+=("$scripts/node.sh" "$@")
}

# Slurm sends SIGUSR1 before the time limit, and before a pre-emption if the cluster is configured to. Only
# the training may get it, so by a file: a signal to the step would end Ray.
ask_to_save() {
    tell "SIGUSR1: asking the training to save and stop"
    touch "$folder/signal"
}

end_step() {
    [[ -n "$step" ]] && kill -0 "$step" 2>/dev/null || return 0
    kill -TERM "$step" 2>/dev/null || true
    local left=$GRACE
    [[ ! -s "$folder/lost" ]] || left=5 # srun waits for the lost node in any case
    while ((left-- > 0)) && kill -0 "$step" 2>/dev/null; do sleep 1 || true; done
    kill -KILL "$step" 2>/dev/null || true
}

leave() {
    end_step
    rm -f "$folder/token"
}

# Waits until the training has ended and the nodes have exited, or the step is over.
wait_for_step() {
    local left=$GRACE
    while kill -0 "$step" 2>/dev/null; do
        if [[ -s "$folder/exit_code" && -s "$folder/lost" ]]; then
            tell "lost: $(<"$folder/lost"). It no longer answers: its machine or its network is down"
            break
        elif [[ -s "$folder/exit_code" ]] && ((left-- <= 0)); then
            tell "some nodes are still running $GRACE s after the training ended: no longer waiting for them"
            break
        fi
        sleep 1 || true
    done
}

requeue() { # why
    local count="${SLURM_RESTART_COUNT:-0}" most="${HYDRAFLOW_MAX_REQUEUES:-10}"
    if [[ "${HYDRAFLOW_REQUEUE:-1}" == 0 ]]; then
        tell "$1; HYDRAFLOW_REQUEUE=0: the same command resumes from the last checkpoint"
    elif ((count >= most)); then
        tell "$1; already requeued $count times (HYDRAFLOW_MAX_REQUEUES):" \
            "the same command resumes from the last checkpoint"
    else
        tell "$1; requeuing, restart $((count + 1))" # before scontrol, during which Slurm may end this script
        if scontrol requeue "$SLURM_JOB_ID"; then
            # wait for Slurm to end this script; a shell handles signals in `wait`, not during a command
            sleep 60 >/dev/null 2>&1 &
            wait "$!" || true
        else
            tell "Slurm refused to requeue the job: the same command resumes from the last checkpoint"
        fi
    fi
}

run_job() { # arguments of the run
    local words=() code=1
    make_folder
    trap leave EXIT
    trap 'tell "SIGTERM: Slurm ends the job (cancelled, requeued, pre-empted or node failed)"; exit 143' TERM
    trap 'exit 130' INT
    trap ask_to_save USR1
    build_step "$@"
    tell "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST; folder $folder"
    "${words[@]}" &
    step=$!
    wait_for_step
    end_step
    if [[ -s "$folder/exit_code" ]]; then
        code="$(<"$folder/exit_code")"
    else
        wait "$step" && code=1 || code=$?
        tell "the nodes exited before the training left an exit code; srun: $code"
    fi
    if [[ "$code" == 0 && -e "$folder/requeue" ]]; then
        requeue "it was asked to stop, and saved"
    elif [[ "$code" != 0 && -s "$folder/lost" ]]; then
        requeue "a node was lost"
    fi
    tell "ended with $code"
    exit "$code"
}
