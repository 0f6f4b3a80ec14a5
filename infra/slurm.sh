#!/usr/bin/env bash
# Harvest on the nodes of a Slurm allocation: a Ray cluster for this job alone, `harvest run` on it, and an end to both.
#
#     sbatch --nodes=4 infra/slurm.sh job.toml --set run.path=/shared/runs/mine
#
# The job file, the data and run.path must be on a disk that every node sees. The environment that has `harvest` in its
# PATH is the one that sbatch is called from. Sent again, or requeued, the same command resumes.
#
#SBATCH --job-name=harvest
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
# --exclusive: the ports below are the same on every node.   --requeue: after a preemption or a broken node.
# --signal: three minutes before the time is up, to stop in order and go back into the queue.

set -euo pipefail
umask 077

if (($# == 0)); then
    echo "slurm.sh: no job file; usage: sbatch infra/slurm.sh JOB [--set KEY.SUB=VALUE]..." >&2
    exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_ip=${HARVEST_HEAD_IP:-$(hostname -I | awk '{print $1}')}   # this script runs on the first node
gpus=${SLURM_GPUS_ON_NODE:-0}
workers=$((${#nodes[@]} * (gpus > 0 ? gpus : 1)))

port=${HARVEST_PORT:-6379}   # the ports of infra/README.md: nine in a row, and a thousand for Ray's workers
ports=(
    --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)) --runtime-env-agent-port=$((port + 3))
    --dashboard-agent-grpc-port=$((port + 4)) --dashboard-agent-listen-port=$((port + 5))
    --metrics-export-port=$((port + 6)) --min-worker-port=10002 --max-worker-port=10999
)

# Only who knows the token may use the cluster: a new one for every start, in a file that nobody else reads. It travels
# by the file, not by the environment, which Slurm keeps.
token_file=${HARVEST_TOKEN_FILE:-$HOME/.harvest-ray-token-$SLURM_JOB_ID}
rm -f "$token_file"
python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$token_file"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token_file RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN

steps=()
run=
signalled=
requeue=

tear_down() {
    trap '' TERM USR1 INT
    [[ -z $run ]] || kill -TERM "$run" 2>/dev/null || true
    ((${#steps[@]} == 0)) || kill -TERM "${steps[@]}" 2>/dev/null || true
    wait || true
    rm -f "$token_file"
}
trap tear_down EXIT

stop() {   # harvest gives its lease back and ends with 130; the loop at the end waits for that
    signalled=1
    [[ -z $run ]] && exit 130
    kill -TERM "$run" 2>/dev/null || true
}
trap stop TERM INT
trap 'requeue=1; stop' USR1

# One `ray start` per node, with all that the node has: without --cpu-bind=none it would be tied to one core.
step() { exec srun --nodes="$1" --ntasks="$1" --ntasks-per-node=1 --cpu-bind=none --mem=0 "${@:2}"; }

step 1 --nodelist="$head" ray start --head --block --node-ip-address="$head_ip" --port="$port" \
    --dashboard-host=127.0.0.1 --dashboard-port=$((port + 7)) --ray-client-server-port=$((port + 8)) \
    --temp-dir="${RAY_TMPDIR:-/tmp}/ray-$(id -u)" --object-store-memory=100000000 "${ports[@]}" &
steps+=($!)

address=$head_ip:$port
for ((tries = 0; ; tries++)); do
    ray status --address="$address" >/dev/null 2>&1 && break
    kill -0 "${steps[0]}" 2>/dev/null || { echo "slurm.sh: the head of the Ray cluster did not start" >&2; exit 1; }
    ((tries < 60)) || { echo "slurm.sh: no answer from the head of the Ray cluster at $address" >&2; exit 1; }
    sleep 2
done

if ((${#nodes[@]} > 1)); then
    step $((${#nodes[@]} - 1)) --exclude="$head" ray start --block --address="$address" \
        --object-store-memory=100000000 "${ports[@]}" &
    steps+=($!)
fi

echo "slurm.sh: Ray at $address with ${#nodes[@]} nodes; dashboard on $head, 127.0.0.1:$((port + 7))"
RAY_ADDRESS=$address harvest run "$1" --set run.workers="$workers" "${@:2}" &
run=$!

while :; do   # a signal ends `wait` early
    signalled=
    status=0
    wait "$run" || status=$?
    [[ -n $signalled ]] || break
done
run=

if [[ -n $requeue && $status -eq 130 ]]; then
    echo "slurm.sh: the time is up; back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
