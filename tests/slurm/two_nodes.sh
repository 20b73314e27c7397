#!/usr/bin/env bash
# A real Slurm of two nodes on one machine. Each node is a network, UTS, PID and mount namespace with a slurmd in it; the controller
# runs outside of them. Run as root.
#
#   two_nodes.sh probe DIR      whether this machine lets it make such namespaces
#   two_nodes.sh up DIR         then: export SLURM_CONF=DIR/slurm.conf
#   two_nodes.sh lose DIR N     node N is gone at once, with its cable: nobody is notified
#   two_nodes.sh start DIR N    a lost node comes back
#   two_nodes.sh down DIR
#
# Needs Debian's packages slurm-wlm munge iproute2 tini. Nodes share the file system but for /dev/shm and /tmp/hydraflow-0 (root),
# which on real machines are their own.
set -euo pipefail

command=$1 dir=$(realpath -m "$2") net=10.77.0 bridge=brhf
CPUS=16 # more than there are: processes of the tests may share cores (SlurmdParameters=config_overrides)

plug_in() { # node
    ip netns add "hf$1"
    ip link add "ve$1" type veth peer name eth0 netns "hf$1"
    ip link set "ve$1" master "$bridge" up
    ip -n "hf$1" addr add "$net.$1/24" dev eth0
    ip -n "hf$1" link set eth0 up
    ip -n "hf$1" link set lo up
}

unplug() { # node
    ip netns del "hf$1" 2>/dev/null || true
    ip link del "ve$1" 2>/dev/null || true
}

start_node() { # node
    mkdir -p "$dir/tmp$1"
    # nsenter, not "ip netns exec": that mounts /sys again, and slurmd then finds no control groups.
    # tini reaps the orphans of the PID namespace. slurmd gets a clean environment, which its jobs would inherit.
    setsid nsenter --net="/run/netns/hf$1" unshare --uts --pid --fork --mount-proc --kill-child sh -c "
        hostname node$1
        mount --bind $dir/tmp$1 /tmp/hydraflow-0
        mount -t tmpfs -o size=4g tmpfs /dev/shm
        exec env -i PATH=\"\$PATH\" HOME=\"\$HOME\" tini -s -- slurmd -D -f $dir/slurm.conf" >"$dir/log/node$1.out" 2>&1 </dev/null &
    echo $! >"$dir/node$1.pid"
}

kill_node() { # node; unshare ignores TERM, and its child dies with it
    [[ -f "$dir/node$1.pid" ]] || return 0
    kill -KILL "$(<"$dir/node$1.pid")" 2>/dev/null || true
    rm -f "$dir/node$1.pid"
}

start_munge() {
    mkdir -p /run/munge
    chown munge /run/munge /var/lib/munge /var/log/munge
    [[ -f /etc/munge/munge.key ]] || mungekey -c
    munge -n </dev/null >/dev/null 2>&1 || runuser -u munge -- munged
}

write_configuration() {
    cat >"$dir/slurm.conf" <<CONF
ClusterName=hf
SlurmctldHost=$(hostname)($net.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire: a job that is put back waits that many seconds, or its nodes would refuse it; the default is 120.
AuthInfo=cred_expire=12
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/ctld.pid
SlurmdPidFile=$dir/slurmd.%n.inner
SlurmctldLogFile=$dir/log/ctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=300
# A busy machine answers late, and a killed process takes its time: neither is a broken node, which would be drained.
MessageTimeout=60
UnkillableStepTimeout=600
KillWait=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
# Tests ask about jobs that ended minutes ago.
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 NodeAddr=$net.1 CPUs=$CPUS RealMemory=8000 State=UNKNOWN
NodeName=node2 NodeAddr=$net.2 CPUs=$CPUS RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

probe() { # the steps of a node that need rights, without Slurm
    down
    mkdir -p "$dir/tmp1" /tmp/hydraflow-0
    trap down EXIT
    ip link add "$bridge" type bridge && ip addr add "$net.254/24" dev "$bridge" && ip link set "$bridge" up
    plug_in 1
    nsenter --net=/run/netns/hf1 unshare --uts --pid --fork --mount-proc --kill-child sh -c "
        hostname node1 && mount --bind $dir/tmp1 /tmp/hydraflow-0 && mount -t tmpfs -o size=4g tmpfs /dev/shm"
    runuser -u munge -- true
}

down() {
    if [[ -f "$dir/ctld.pid" ]]; then kill "$(<"$dir/ctld.pid")" 2>/dev/null || true; fi
    for node in 1 2; do kill_node "$node"; done
    sleep 1
    for node in 1 2; do unplug "$node"; done
    ip link del "$bridge" 2>/dev/null || true
}

up() {
    down
    rm -rf "$dir"
    mkdir -p "$dir"/{state,log,spool/node1,spool/node2} /tmp/hydraflow-0
    ip link add "$bridge" type bridge
    ip addr add "$net.254/24" dev "$bridge"
    ip link set "$bridge" up
    for node in 1 2; do plug_in "$node"; done
    start_munge
    write_configuration
    slurmctld -f "$dir/slurm.conf"
    for node in 1 2; do start_node "$node"; done
}

case "$command" in
    probe) probe ;;
    up) up ;;
    down) down ;;
    lose)
        ip link set "ve$3" down
        kill_node "$3"
        ;;
    start)
        ip link set "ve$3" up
        start_node "$3"
        ;;
    *)
        echo "two_nodes.sh: there is no command $command" >&2
        exit 2
        ;;
esac
