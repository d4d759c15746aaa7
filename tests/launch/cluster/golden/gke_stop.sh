set -euo pipefail

kubectl() { command kubectl --context=gke_my-project_us-east5_pods --namespace=default "$@"; }

kubectl delete jobset mine --ignore-not-found --cascade=foreground
