#!/bin/bash
# A job for SLURM, one rank a node over Gloo, in an environment that all nodes see at the same path:
#
#   sbatch --nodes=4 docker/slurm.sh python examples/torch/digits.py --recipe adaptive
#
# On nodes with several GPUs: --ntasks-per-node=GPUS, which becomes the ranks of each node.
#SBATCH --job-name=hvd-adaptive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "Name the command that every rank runs: sbatch $0 python train.py" >&2
    exit 2
fi
ranks_per_node=${SLURM_NTASKS_PER_NODE:-1}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$ranks_per_node/" | paste -sd, -)
ranks=$((SLURM_JOB_NUM_NODES * ranks_per_node))

# What is wrong with these hosts is known before the training starts, with its remedy.
hvd-adaptive doctor --hosts "$hosts" --seconds 0.5

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
exec horovodrun --gloo -np "$ranks" -H "$hosts" "$@"
