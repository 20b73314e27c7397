# shellcheck shell=bash
# A job from its first line to its last, on the first of its nodes. Sourced by the batch script (examples/slurm/ppo.sbatch), which sets
# HYDRAFLOW_PYTHON, HYDRAFLOW_MODULE and HYDRAFLOW_SCRIPTS, and then calls run_job with the arguments of the run.
#
# It makes a folder for the job with Ray's token in it, starts node.sh once on every node, hands on signals, waits, ends exactly what
# it started, and puts the job back into the queue when it was asked to stop and saved, or when it lost a node.
# What the nodes tell each other are files in that folder, which all of them see: runs/slurm/job-<id>/.
#
#   HYDRAFLOW_REQUEUE=0           never put the job back
#   HYDRAFLOW_MAX_REQUEUES=10     how often at most
#   HYDRAFLOW_JOB_DIR             where the job's folder is made, on a file system that all nodes see; runs/slurm
#   HYDRAFLOW_CONTAINER, HYDRAFLOW_CONTAINER_MOUNTS, HYDRAFLOW_NETWORK_INTERFACE: see the batch script
set -euo pipefail

GRACE=20 # seconds that the other nodes get to end by themselves
step="" folder=""

tell() { printf '[job %s] %s\n' "$SLURM_JOB_ID" "$*"; }

make_folder() {
    folder="$(realpath -m "${HYDRAFLOW_JOB_DIR:-runs/slurm}")/job-$SLURM_JOB_ID"
    rm -rf "$folder" # of an earlier start of this job
    mkdir -p "$(dirname "$folder")" # as open as the user has it; the job's own is the user's alone
    (
        umask 077
        if ! mkdir "$folder"; then # a user who created it in the meantime could read the token
            tell "HYDRAFLOW_JOB_DIR=$(dirname "$folder"): others write to it; name a folder of your own" >&2
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
    local scripts mounts
    scripts="$(realpath "$HYDRAFLOW_SCRIPTS")"
    mounts="$PWD:$PWD,$folder:$folder,$scripts:$scripts${HYDRAFLOW_CONTAINER_MOUNTS:+,$HYDRAFLOW_CONTAINER_MOUNTS}"
    words=(srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0)
    words+=(--export=ALL) # where the job was submitted with --export=NONE, srun would start the nodes without our variables, too
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || words+=("--cpus-per-task=$SLURM_CPUS_PER_TASK") # srun does not take it from sbatch
    case "${HYDRAFLOW_CONTAINER:-}" in
        "") words+=(bash) ;;
        apptainer:*)
            words+=(apptainer exec --bind "$mounts" --pwd "$PWD")
            [[ -z "${SLURM_GPUS_ON_NODE:-}" ]] || words+=(--nv)
            words+=("${HYDRAFLOW_CONTAINER#apptainer:}" bash)
            ;;
        pyxis:*)
            words+=("--container-image=${HYDRAFLOW_CONTAINER#pyxis:}" "--container-mounts=$mounts" "--container-workdir=$PWD" bash)
            ;;
        *)
            tell "HYDRAFLOW_CONTAINER=$HYDRAFLOW_CONTAINER: must be apptainer:FILE.sif or pyxis:IMAGE" >&2
            exit 2
            ;;
    esac
    words+=("$scripts/node.sh" "$@")
}

# Slurm warns before the time limit, and before a pre-emption if the cluster says so. The training must hear of it, and nothing else:
# a signal to the step would end Ray.
ask_to_save() {
    tell "SIGUSR1: the training is asked to save and end"
    touch "$folder/signal"
}

end_step() {
    [[ -n "$step" ]] && kill -0 "$step" 2>/dev/null || return 0
    kill -TERM "$step" 2>/dev/null || true
    local left=$GRACE
    [[ ! -s "$folder/lost" ]] || left=5 # srun would wait for the lost node
    while ((left-- > 0)) && kill -0 "$step" 2>/dev/null; do sleep 1 || true; done
    kill -KILL "$step" 2>/dev/null || true
}

leave() {
    end_step
    rm -f "$folder/token"
}

# Until the training has ended and the nodes have left, or the step is over.
wait_for_step() {
    local left=$GRACE
    while kill -0 "$step" 2>/dev/null; do
        if [[ -s "$folder/exit_code" && -s "$folder/lost" ]]; then
            tell "lost: $(<"$folder/lost"). It no longer answers: its machine or its network is gone"
            break
        elif [[ -s "$folder/exit_code" ]] && ((left-- <= 0)); then
            tell "some nodes have not left $GRACE s after the end: they are not waited for"
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
        tell "$1; it was put back $count times already (HYDRAFLOW_MAX_REQUEUES): the same command resumes from the last checkpoint"
    else
        tell "$1; back into the queue, for the $((count + 1)). time" # first: Slurm may end this script before scontrol comes back
        if scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 >/dev/null 2>&1 & # Slurm ends this script, and a shell hears signals while it waits, not while it runs something
            wait "$!" || true
        else
            tell "Slurm does not put it back: the same command resumes from the last checkpoint"
        fi
    fi
}

run_job() { # arguments of the run
    local words=() code=1
    make_folder
    trap leave EXIT
    trap 'tell "SIGTERM: Slurm ends the job (cancelled, put back, pre-empted, or a node failed)"; exit 143' TERM
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
        tell "the nodes ended without an exit code of the training; srun: $code"
    fi
    if [[ "$code" == 0 && -e "$folder/requeue" ]]; then
        requeue "it was asked to stop, and saved"
    elif [[ "$code" != 0 && -s "$folder/lost" ]]; then
        requeue "a node was lost"
    fi
    tell "ended with $code"
    exit "$code"
}
