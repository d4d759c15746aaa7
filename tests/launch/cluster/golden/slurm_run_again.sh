set -euo pipefail

mkdir -p "$HOME/aamoe_jobs"
touch "$HOME/aamoe_jobs/mine.log"
before=$(wc -l <"$HOME/aamoe_jobs/mine.log")

if [ -n "$(squeue --me --name=mine --noheader)" ]; then
  echo "mine is in the queue already: stop it, or choose another --name" >&2
  exit 1
fi

code=0
sbatch --wait --output="$HOME/aamoe_jobs/mine.log" <<'END' || code=$?
#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --exclude=bad-1,bad-2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
cd /opt/aamoe_jax || exit 1
export JAX_PLATFORMS=cuda

attempt() {
srun \
  --nodes=4 \
  --ntasks=4 \
  --ntasks-per-node=1 python3 -m launch.cluster.probe \
  --devices=8 \
  --run_dir=/mnt/shared/runs/mine \
  --min_free_gib=20 || return
srun \
  --kill-on-bad-exit=0 python3 -m launch.train \
  --gin_file=aamoe.gin \
  '--gin_param=TrainingConfig.seed = 1' \
  --run_dir=/mnt/shared/runs/mine \
  --distributed=auto
}
code=0
attempt || code=$?

tried="$HOME/aamoe_jobs/$SLURM_JOB_ID.tried"
case $code in
  143) scontrol requeue "$SLURM_JOB_ID" ;;
  0 | 1 | 3 | 6 | 130) ;;
  *)
    echo "$code" >>"$tried"
    if [ "$(wc -l <"$tried")" -le 3 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    ;;
esac
exit "$code"
END

tail -n +$((before + 1)) "$HOME/aamoe_jobs/mine.log" | grep -E '^(un)?healthy ' || true

exit "$code"
