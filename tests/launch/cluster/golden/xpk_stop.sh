set -euo pipefail

xpk workload delete \
  --project=my-project \
  --zone=us-east5-a \
  --cluster=pods \
  --workload=mine \
  --force
