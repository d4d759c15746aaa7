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

ask 'sudo mount -a' || exit $?
ask 'cd /opt/aamoe_jax && JAX_PLATFORMS=tpu python3 -m launch.cluster.probe --devices=4 --run_dir=/mnt/shared/runs/mine --min_free_gib=20' || exit $?
