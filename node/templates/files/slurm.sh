#!/bin/bash
# sbatch slurm.sh: one island on @NODES@ of the cluster, all of the GPUs there. It keeps its identity
# and checkpoints beside this file, leaves cleanly before the time is up, and goes on when it is
# submitted or requeued again, as it is when a machine fails. On several machines this folder has to be
# on a disk that all see; which of them has the node is read from Slurm: the others only train.
#SBATCH --job-name=atoll
#SBATCH --nodes=@NNODES@
#SBATCH --ntasks-per-node=1
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
command=("@PYTHON@" -m node "${arguments[@]}")
if [[ "${SLURM_NNODES:-1}" -gt 1 ]]; then
  # one on each machine; one that ends is gone on without, as long as the minimum of --nnodes is there.
  # A machine that fails has the job requeued. Submitted with --no-kill it goes on without that, too;
  # but where it was the first, which has the node, the others wait for the end of the job's time
  command=(srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --no-kill "${command[@]}")
  hosts="@MINIMUM@:$SLURM_NNODES"
  # sbatch --nodes may ask for fewer than this file was made for: all of those, then
  ((@MINIMUM@ <= SLURM_NNODES)) || hosts=$SLURM_NNODES
  command+=(--nnodes "$hosts")
fi

node='' again=yes
# set before the node starts, so that none is left behind; a signal ends `wait` before the node has
# ended: wait once more
trap 'again=yes; node=${node:-$(jobs -p)}; [[ -n "$node" ]] || exit 143; kill -TERM "$node" 2>/dev/null || true' TERM INT
"${command[@]}" &
node=$!
while [[ -n "$again" ]]; do
  again=
  status=0
  wait "$node" || status=$?
done
exit "$status"
