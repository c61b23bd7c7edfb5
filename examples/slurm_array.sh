#!/bin/bash
# Answers many files on eight nodes, one shard each, and goes on after a time limit or a failure.
#
#   sbatch examples/slurm_array.sh recipe.yaml 'rows/*.jsonl.gz' answers
#   cbgen merge answers.jsonl 'answers/shard-*.jsonl'        # when all tasks have ended
#
# Submitting it again answers what is left; `sbatch --array=3 ...` does that for one shard.
#SBATCH --job-name=cbgen
#SBATCH --array=0-7
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

num_shards=8 # as many as --array has above; $SLURM_ARRAY_TASK_COUNT is 1 when one is run again
recipe=$1
inputs=$2
folder=$3
shard=$SLURM_ARRAY_TASK_ID

mkdir -p "$folder" || exit 3
srun cbgen run "$recipe" -i "$inputs" -o "$folder/shard-$shard.jsonl" \
  --shard "$shard/$num_shards" --resume --requeue-signal USR1
code=$?

case $code in
  0) ;;
  1) echo "some rows of shard $shard carry an error" >&2 ;;
  4) exec scontrol requeue "${SLURM_ARRAY_JOB_ID}_$shard" ;;
  *) exit "$code" ;;
esac
