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

ask 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { touch stopped; if [ ! -s pid ] || ! kill -TERM "$(cat pid)" 2>/dev/null; then exit 0; fi; timeout 600 tail --pid="$(cat pid)" -f /dev/null || kill -KILL "$(cat pid)"; }' || true
slice delete --force --quiet
