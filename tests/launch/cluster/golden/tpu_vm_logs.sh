set -euo pipefail

on() { gcloud compute tpus tpu-vm ssh mine --project=my-project --zone=us-east5-a --worker="$1" --command="$2" --quiet; }

on 0 'mkdir -p aamoe_jobs/mine && cd aamoe_jobs/mine && { tail -n 100 -F log; }'
