#!/bin/bash
# sbatch slurm.sh: one island on one machine of the cluster, all of its GPUs. It keeps its identity
# and checkpoints beside this file, leaves cleanly before the time is up, and goes on when it is
# submitted or requeued again.
#SBATCH --job-name=atoll
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@@STOP_S@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=atoll-%j.log

set -euo pipefail

export ATOLL_DIR="${SLURM_SUBMIT_DIR:-$PWD}/atoll-state"
arguments=(@COMMAND@)
if [[ "${arguments[0]}" == start ]] && compgen -G "$ATOLL_DIR/checkpoints/ckpt-*" >/dev/null; then
  arguments+=(--resume)
fi

"@PYTHON@" -m node "${arguments[@]}" &
node=$!
trap 'kill -TERM "$node"' TERM INT
# a signal ends `wait` before the node has ended
status=0
while kill -0 "$node" 2>/dev/null; do
  status=0
  wait "$node" || status=$?
done
exit "$status"
