#!/bin/bash
# One volume on 16 jobs of Slurm, and a last job that finishes the output:
#   bash examples/slurm_array.sh --config my.yaml --ckpt_path best --data.predict large.zarr --output restored.ome.zarr
# Without Slurm the same runs as processes of this machine, PARTS of them.
# Every part builds the network from this command line, so weights come from --ckpt_path.
set -euo pipefail
parts=${PARTS:-16}

if command -v sbatch > /dev/null; then
    # --dependency=afterok: the last job starts when all parts have ended well. A job that was killed is submitted again,
    # alone (--array=3-3): --part names its share, and what is finished is kept.
    array=$(sbatch --parsable --job-name=farfield --array="1-$parts" --ntasks=1 --cpus-per-task=8 --mem=32G \
        --time=04:00:00 --export=ALL,PARTS="$parts" --wrap="OMP_NUM_THREADS=\$SLURM_CPUS_PER_TASK \
        farfield predict $(printf '%q ' "$@") --part \$SLURM_ARRAY_TASK_ID/\$PARTS --timeout 14400")
    sbatch --dependency="afterok:$array" --job-name=farfield-reduce --ntasks=1 --mem=32G --time=00:30:00 \
        --wrap="farfield predict $(printf '%q ' "$@") --part reduce"
    exit
fi

threads=$(($(nproc) / parts))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
processes=()
for part in $(seq "$parts"); do
    farfield predict "$@" --part "$part/$parts" &
    processes+=($!)
done
for process in "${processes[@]}"; do
    wait "$process" # with its status: a part that failed ends the script
done
farfield predict "$@" --part reduce
