#!/bin/bash
# Trains under SLURM; saves and stops before the limit, and is started again. README.md tells more.
#
#   sbatch submit-training-simple.sh --dataset=text.parquet --exp_name=my_experiment
#   sbatch submit-training-simple.sh --distributed --continue --use_torch_distributed_ckpt
#
# Adapt these to your cluster; `sbatch --nodes=2 submit-training-simple.sh ..` overrides them.
#SBATCH --job-name=transformer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=00:40:00
#SBATCH --output=%x-%j.log
# The limit is no failure: the same job goes on, under the same number, in the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
##SBATCH --partition=normal
##SBATCH --account=your-account

set -euo pipefail

# What the options below do not say. Anything after `--` goes to train.py as it is, and wins.
TRAINING_STEPS=3000
LOGGING_FREQUENCY=10
CHECKPOINT_FREQUENCY=1000
BATCH_SIZE=1
EXP_NAME=default-exp
DATASET=${DATASET:-text.parquet}
PYTHON=${PYTHON:-python}

usage() {
    cat <<'USAGE'
Usage: sbatch submit-training-simple.sh [OPTION]... [-- OPTION OF train.py]...
  --dataset=FILE                 parquet file with text [$DATASET, else text.parquet]
  --distributed                  one task per GPU, trained together
  --exp_name=NAME                the experiment: folder of its checkpoints [default-exp]
  --continue                     go on from the newest checkpoint, if there is one
  --use_torch_distributed_ckpt   each rank writes its part of a checkpoint
  --timeaware-checkpointing      save and stop before the limit, and be requeued (always; accepted as it was)
  --no-timeaware-checkpointing   run into the limit
  --sequence-length=N            tokens of a sequence
  --use_flash_attention          the flash kernel or none
  --fused-optimizer              AdamW in one kernel
  --compile                      torch.compile
  --log-loss-to-csv              every step's loss
  --profile-nsys                 under `nsys profile`, steps 10 to 12
  --dry-run                      print the command, and do not run it
USAGE
}

distributed=() wrapper=() train_args=() passed=()
is_continued=no is_dry=no timeaware=(--timeaware-checkpointing)
while (($#)); do
    case $1 in
        --distributed) distributed=(--distributed) ;;
        --exp_name=?*) EXP_NAME=${1#*=} ;;
        --dataset=?*) DATASET=${1#*=} ;;
        --sequence-length=?*) train_args+=(--sequence-length "${1#*=}") ;;
        --continue) is_continued=yes ;;
        --use_torch_distributed_ckpt) train_args+=(--use-torch-distributed-ckpt) ;;
        --timeaware-checkpointing) ;;
        --no-timeaware-checkpointing) timeaware=() ;;
        --use_flash_attention | --log-loss-to-csv | --fused-optimizer | --compile) train_args+=("$1") ;;
        --profile-nsys)
            wrapper=(nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop
                --output="profile-${SLURM_JOB_ID:-0}-%q{SLURM_PROCID}" --force-overwrite=true)
            train_args+=(--profile)
            ;;
        --dry-run) is_dry=yes ;;
        -h | --help) usage; exit 0 ;;
        --) shift; passed=("$@"); break ;;
        *) echo "submit-training-simple.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

# sbatch runs a copy of this file: train.py is beside the original, or where the job was submitted.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
submitted=${SLURM_SUBMIT_DIR:-$PWD}
for folder in "${TRAIN_DIR:-$here}" "$submitted" "$submitted/examples/transformer_slurm"; do
    [[ -f $folder/train.py ]] && train=$folder/train.py && break
done
if [[ -z ${train:-} ]]; then
    echo "submit-training-simple.sh: no train.py: submit from its folder, or set TRAIN_DIR to it" >&2
    exit 2
fi

# A job that was requeued goes on, whatever it was told when it was submitted.
if [[ $is_continued == yes || ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then
    train_args+=(--resume-from-checkpoint latest)
fi

# SLURM before 23.02 does not say when the job ends; squeue does.
if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_JOB_END_TIME:-} ]]; then
    ends=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format '%A %e' 2>/dev/null | awk -v job="$SLURM_JOB_ID" '$1 == job {print $2}') || ends=
    if seconds=$(date -d "$ends" +%s 2>/dev/null) && [[ -n $ends ]]; then
        export SLURM_JOB_END_TIME=$seconds
    fi
fi

# Where the ranks meet: the first host of the job, and a port of its own for each start of each job.
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
export MASTER_PORT=${MASTER_PORT:-$((20000 + (${SLURM_JOB_ID:-0} * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

tasks=(--ntasks=1 --nodes=1)
((${#distributed[@]})) && tasks=()
command=(srun "${tasks[@]}" --kill-on-bad-exit=1 "${wrapper[@]}" "$PYTHON" -u "$train" --dataset "$DATASET"
    --experiment_name "$EXP_NAME" --training-steps "$TRAINING_STEPS" --logging-frequency "$LOGGING_FREQUENCY"
    --checkpoint-frequency "$CHECKPOINT_FREQUENCY" --batch-size "$BATCH_SIZE" --verify-checkpoints
    "${timeaware[@]}" "${distributed[@]}" "${train_args[@]}" "${passed[@]}")

if [[ $is_dry == yes ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

"${command[@]}" &
step=$!
# SLURM signals the tasks itself; a signal that only this shell gets (scancel --batch, --signal=B:..) goes on to them.
for signal in USR1 USR2 TERM INT; do
    # shellcheck disable=SC2064  # the number of today
    trap "kill -$signal $step 2>/dev/null || true" "$signal"
done
status=0
while :; do
    wait "$step" && status=0 || status=$?
    kill -0 "$step" 2>/dev/null || break # else a signal has ended the wait, and not the job
done
# 0: finished. 75: saved and stopped in time, and asked SLURM to start this job again.
exit "$status"
