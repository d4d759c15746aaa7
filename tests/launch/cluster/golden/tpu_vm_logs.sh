set -Eeuo pipefail
# A command that fails ends the script and is named; what the job itself ended with is passed on by `exit`.
failed() {
  local command=${2:-$3}
  if [ "$1" != 10 ]; then echo "error: exit code $1 of: ${command:0:200}" >&2; fi
  exit 10
}
trap 'failed "$?" "${FUNCNAME[0]:+${FUNCNAME[0]} $*}" "$BASH_COMMAND"' ERR

on() { gcloud compute tpus tpu-vm ssh mine --project=my-project --zone=us-east5-a --worker="$1" --command="$2" --quiet; }

on 0 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { tail -n 100 -F log; }'
