set -Eeuo pipefail
# A command that fails ends the script and is named; what the job itself ended with is passed on by `exit`.
failed() {
  local command=${2:-$3}
  if [ "$1" != 10 ]; then echo "error: exit code $1 of: ${command:0:200}" >&2; fi
  exit 10
}
trap 'failed "$?" "${FUNCNAME[0]:+${FUNCNAME[0]} $*}" "$BASH_COMMAND"' ERR

slice() { gcloud compute tpus queued-resources "$1" mine --project=my-project --zone=us-east5-a "${@:2}"; }
state() { slice describe --format='value(state.state)' 2>/dev/null || echo ABSENT; }

on() { gcloud compute tpus tpu-vm ssh mine --project=my-project --zone=us-east5-a --worker="$1" --command="$2" --quiet; }

# The exit code of a job whose hosts ended with those on standard input, one a line.
worst() {
  local codes code
  codes=$(cat)
  for code in 6 1 3 130 4 7 8 70 137 134 139 143 5 0; do
    if grep -qx "$code" <<<"$codes"; then return "$code"; fi
  done
  return 5
}

# Runs a command on every host, prints what they print, and ends as the worst of them did.
ask() {
  local output
  output=$(on all "($1); printf '\nexit code %s\n' \"\$?\"") || true
  sed -e '/^exit code /d' -e '/^$/d' <<<"$output"
  output=$(sed -n 's/^exit code //p' <<<"$output")
  if [ "$(grep -c . <<<"$output")" -lt 16 ]; then return 255; fi
  worst <<<"$output"
}

# A slice that was lost is given back before another one is asked for.
case $(state) in
  SUSPENDING | SUSPENDED | FAILED) slice delete --force --quiet ;;
esac
if [ "$(state)" = ABSENT ]; then
  slice create --node-id=mine --accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5 --spot
fi
until now=$(state) && [ "$now" = ACTIVE ]; do
  case $now in
    SUSPENDING | SUSPENDED) exit 143 ;;
    FAILED) exit 5 ;;
  esac
  sleep 30
done

# Does what it is told, or gives the slice back where a host is not fit.
fit() {
  local code=0
  "$@" || code=$?
  case $code in
    0) ;;
    6 | 255)
      echo "unhealthy slice: it is given back, and another one asked for"
      slice delete --force --quiet
      exit 6
      ;;
    *) exit "$code" ;;
  esac
}

# Where every host still runs the job, only a connection broke.
if ! ask 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { kill -0 "$(cat pid)"; }' 2>/dev/null; then
  fit ask 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { if [ ! -s pid ] || ! kill -TERM "$(cat pid)" 2>/dev/null; then exit 0; fi; timeout 600 tail --pid="$(cat pid)" -f /dev/null || kill -KILL "$(cat pid)"; }'
  fit ask 'sudo mount -a'
  fit ask 'cd /opt/aamoe_jax && JAX_PLATFORMS=tpu python3 -m launch.cluster.probe --devices=4 --run_dir=/mnt/shared/runs/mine --min_free_gib=20'
  fit ask 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { rm -f pid code stopped; nohup setsid bash -c '"'"'cd /opt/aamoe_jax || exit 1; export JAX_PLATFORMS=tpu; env '"'"'"'"'"'"'"'"'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true --xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true --xla_tpu_megacore_fusion_allow_ags=false'"'"'"'"'"'"'"'"' python3 -m launch.train --gin_file=aamoe.gin '"'"'"'"'"'"'"'"'--gin_param=TrainingConfig.seed = 1'"'"'"'"'"'"'"'"' --run_dir=/mnt/shared/runs/mine --distributed=auto & echo $! >"$OLDPWD/pid"; wait $!; code=$?; cd "$OLDPWD" || exit; if [ -f stopped ]; then code=130; fi; echo "$code" >code'"'"' >>log 2>&1 </dev/null & for _ in 1 2 3 4 5 6 7 8 9 10; do if [ -s pid ]; then exit 0; fi; sleep 1; done; exit 1; }'
fi

for _ in 1 2 3 4 5 6 7 8 9 10; do
  code=0
  ask 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { tail --pid="$(cat pid)" -f /dev/null; for _ in 1 2 3 4 5 6 7 8 9 10; do if [ -s code ]; then exit "$(cat code)"; fi; sleep 1; done; exit 137; }' || code=$?
  if [ "$code" != 255 ]; then exit "$code"; fi
  if [ "$(state)" != ACTIVE ]; then exit 143; fi
  sleep 30
done
exit 5
