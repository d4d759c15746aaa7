set -Eeuo pipefail
# A command that fails ends the script and is named; what the job itself ended with is passed on by `exit`.
failed() {
  local command=${2:-$3}
  if [ "$1" != 10 ]; then echo "error: exit code $1 of: ${command:0:200}" >&2; fi
  exit 10
}
trap 'failed "$?" "${FUNCNAME[0]:+${FUNCNAME[0]} $*}" "$BASH_COMMAND"' ERR

mkdir -p "$HOME/aamoe_jobs"
touch "$HOME/aamoe_jobs/mine.log"
before=$(wc -l <"$HOME/aamoe_jobs/mine.log")

if [ -n "$(squeue --me --name=mine --noheader)" ]; then
  echo "mine is in the queue already: stop it, or choose another --name" >&2
  exit 10
fi

code=0
sbatch \
  --wait \
  --job-name=mine \
  --nodes=4 \
  --ntasks-per-node=8 \
  --gpus-per-node=8 \
  --time=24:00:00 \
  --partition=gpu \
  --account=lab \
  --requeue \
  --open-mode=append \
  --signal=TERM@300 \
  --output="$HOME/aamoe_jobs/mine.log" <<'END' | tee "$HOME/aamoe_jobs/mine.sent" || code=$?
#!/bin/bash
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

# sbatch says that the job was sent, and ends as it did.
if [ ! -s "$HOME/aamoe_jobs/mine.sent" ]; then
  echo "error: exit code $code of: sbatch" >&2
  exit 10
fi

tail -n +$((before + 1)) "$HOME/aamoe_jobs/mine.log" | grep -E '^(un)?healthy ' || true

exit "$code"
