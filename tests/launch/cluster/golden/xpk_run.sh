set -Eeuo pipefail
# A command that fails ends the script and is named; what the job itself ended with is passed on by `exit`.
failed() {
  local command=${2:-$3}
  if [ "$1" != 10 ]; then echo "error: exit code $1 of: ${command:0:200}" >&2; fi
  exit 10
}
trap 'failed "$?" "${FUNCNAME[0]:+${FUNCNAME[0]} $*}" "$BASH_COMMAND"' ERR

kubectl() { command kubectl --context=gke_my-project_us-east5_pods --namespace=default "$@"; }

if [ "$(kubectl get jobset mine --ignore-not-found --output=jsonpath='{.kind} {.status.terminalState}')" = "JobSet " ]; then
  echo "it runs already, as it was started: waiting for its end" >&2
else
  kubectl delete jobset mine --ignore-not-found --cascade=foreground
  xpk workload create \
  --project=my-project \
  --zone=us-east5-a \
  --cluster=pods \
  --workload=mine \
  --tpu-type=v6e-8 \
  --num-slices=1 \
  --docker-image=gcr.io/p/i \
  --storage=shared \
  --max-restarts=3 \
  --restart-on-exit-codes=4,5,7,8,70 \
  --termination-grace-period-seconds=600 \
  '--command=cd /opt/aamoe_jax && export JAX_PLATFORMS=tpu && python3 -m launch.cluster.probe --devices=4 --run_dir=/mnt/shared/runs/mine --min_free_gib=20 && exec env '"'"'LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true --xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true --xla_tpu_scoped_vmem_limit_kib=98304'"'"' python3 -m launch.train --gin_file=aamoe.gin '"'"'--gin_param=TrainingConfig.seed = 1'"'"' --run_dir=/mnt/shared/runs/mine --distributed=auto'
fi

# The exit code of a job whose hosts ended with those on standard input, one a line.
worst() {
  local codes code
  codes=$(cat)
  for code in 6 1 3 130 4 7 8 70 137 134 139 143 5 0; do
    if grep -qx "$code" <<<"$codes"; then return "$code"; fi
  done
  return 5
}

while true; do
  if state=$(kubectl get jobset mine --ignore-not-found --output=jsonpath='{.kind} {.status.terminalState}'); then
    case $state in
      "") exit 130 ;; # somebody deleted it
      "JobSet Completed") exit 0 ;;
      "JobSet Failed") break ;;
    esac
  fi
  sleep 30
done

pods=$(kubectl get pods --selector=jobset.sigs.k8s.io/jobset-name=mine --output=jsonpath='{range .items[*]}{.spec.nodeName}{range .status.initContainerStatuses[*]} {.state.terminated.exitCode}{end}{range .status.containerStatuses[*]} {.state.terminated.exitCode}{end}{"\n"}{end}')
while read -r node codes; do
  if [[ " $codes " == *" 6 "* ]]; then
    pool=$(kubectl get node "$node" --output=jsonpath='{.metadata.labels.cloud\.google\.com/gke-nodepool}')
    echo "unhealthy $pool: the probe failed on $node"
  fi
done <<<"$pods"
cut -s -d ' ' -f 2- <<<"$pods" | tr ' ' '\n' | grep -vx 0 | worst || exit $?
