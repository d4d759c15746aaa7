set -euo pipefail

kubectl() { command kubectl --context=gke_my-project_us-east5_pods --namespace=default "$@"; }

kubectl get jobset mine
kubectl get pods --selector=jobset.sigs.k8s.io/jobset-name=mine --output=wide
