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

echo "the slice is $(state)"
on all 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { if [ -s code ]; then echo "$(hostname): ended with exit code $(cat code)"; elif [ -s pid ] && kill -0 "$(cat pid)"; then echo "$(hostname): runs"; else echo "$(hostname): idle"; fi; }'
