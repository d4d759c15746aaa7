set -euo pipefail

kubectl() { command kubectl --context=gke_my-project_us-east5_pods --namespace=default "$@"; }

kubectl logs --selector=jobset.sigs.k8s.io/jobset-name=mine,batch.kubernetes.io/job-completion-index=0 --all-containers --follow --tail=100
