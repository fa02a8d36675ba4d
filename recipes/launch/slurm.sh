#!/bin/bash
#SBATCH --job-name=gcore
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
# A run of G-Core on the nodes of a SLURM job. No Ray needs to run before.
#
#     sbatch --nodes=4 recipes/launch/slurm.sh train recipe.yaml run.dir=/shared/runs
#
# The words after slurm.sh are those of the command `gcore`. G-Core must be installed on all nodes, and `ray`, `gcore`
# and `python` must be in PATH (activate the environment before sbatch, or here). run.dir must be on shared storage.
#
#     batch script (first node): address and token ──srun──> one task per node
#     task 0       the head of Ray, then `gcore ...`; its exit code is that of the job
#     other tasks  a node of Ray, which ends when the head has ended
#
# Variables: GCORE_INTERFACE, the network interface to use (default: that of the first address of the first node);
# GCORE_PORT (default 6379).
set -euo pipefail
port=${GCORE_PORT:-6379}
wait_s=300  # for the head, and for all nodes to join

if [ -z "${GCORE_TASK:-}" ]; then # the batch script
    if [ -n "${GCORE_INTERFACE:-}" ]; then
        GCORE_HEAD=$(ip -4 -o address show dev "$GCORE_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
    else
        GCORE_HEAD=$(hostname -I | awk '{print $1}')
    fi
    RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')
    export GCORE_HEAD RAY_AUTH_TOKEN GCORE_TASK=1 RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
    # the text of the script, because SLURM's copy of the file is only on the first node
    exec srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --wait=0 \
        bash -c "$(cat "$0")" gcore-task "$@"
fi

is_up() { (exec 3<> "/dev/tcp/$GCORE_HEAD/$port") 2> /dev/null; }
own=$(ip -4 -o route get "$GCORE_HEAD" | sed -n 's/.* src \([0-9.]*\).*/\1/p')
options=(--block --disable-usage-stats "--node-ip-address=$own" "--num-cpus=${SLURM_CPUS_ON_NODE:-$(nproc)}")
log=$(mktemp)
stop() { # Ray ends its processes at SIGTERM; it may ignore the signal while it starts
    for ((i = 0; i < 20; i++)); do
        kill "${ray:-}" 2> /dev/null || break
        sleep 1
    done
    kill -9 "${ray:-}" 2> /dev/null || true
    rm -f "$log"
}
trap stop EXIT

if [ "$SLURM_PROCID" = 0 ]; then
    ray start --head "--port=$port" --include-dashboard=false "${options[@]}" > "$log" 2>&1 &
    ray=$!
    export RAY_ADDRESS=$GCORE_HEAD:$port
    for ((i = 0; i < wait_s; i++)); do
        if ! kill -0 "$ray" 2> /dev/null; then
            cat "$log"
            exit 1
        fi
        if is_up; then break; fi
        sleep 1
    done
    python - "$SLURM_NNODES" "$wait_s" "$ray" "$log" << 'EOF'
import os, sys, time
import ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while not ray.is_initialized():  # the port is open before the first node has joined
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError) as error:
        if not os.path.exists(f"/proc/{sys.argv[3]}"):
            sys.exit(f"slurm.sh: the head of Ray has ended: {open(sys.argv[4]).read()}")
        if time.monotonic() > deadline:
            sys.exit(f"slurm.sh: Ray did not start within {sys.argv[2]} s: {error}")
        time.sleep(1)
while (found := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"slurm.sh: only {found} of {wanted} nodes have joined Ray within {sys.argv[2]} s")
    time.sleep(1)
print(f"slurm.sh: {found} nodes have joined Ray", flush=True)
EOF
    gcore "$@"
else
    for ((i = 0; i < wait_s; i++)); do
        if is_up; then break; fi
        sleep 1
    done
    ray start "--address=$GCORE_HEAD:$port" "${options[@]}" > "$log" 2>&1 &
    ray=$!
    while is_up; do
        if ! kill -0 "$ray" 2> /dev/null; then
            cat "$log"
            echo "slurm.sh: Ray on $(hostname) has ended before the run" >&2
            exit 1
        fi
        sleep 3
    done
fi
