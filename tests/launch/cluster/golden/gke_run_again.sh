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
  kubectl apply --filename=- <<'END'
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: mine
  namespace: default
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
  failurePolicy:
    maxRestarts: 3
    rules:
    - name: final
      action: FailJobSet
      onJobFailureReasons:
      - PodFailurePolicy
      onJobFailureMessagePatterns:
      - matching FailJob rule at index [0]$
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons:
      - PodFailurePolicy
      onJobFailureMessagePatterns:
      - matching FailJob rule at index [12]$
    - name: other
      action: RestartJobSet
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        parallelism: 64
        completions: 64
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              operator: In
              values:
              - 1
              - 3
              - 6
              - 130
          - action: FailJob
            onExitCodes:
              operator: In
              values:
              - 143
          - action: FailJob
            onPodConditions:
            - type: DisruptionTarget
              status: 'True'
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 600
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 16x16
            tolerations:
            - key: google.com/tpu
              operator: Exists
              effect: NoSchedule
            - key: cloud.google.com/gke-spot
              operator: Exists
              effect: NoSchedule
            volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: shared
            affinity:
              nodeAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                  nodeSelectorTerms:
                  - matchExpressions:
                    - key: cloud.google.com/gke-nodepool
                      operator: NotIn
                      values:
                      - bad-1
                      - bad-2
            initContainers:
            - name: probe
              image: gcr.io/p/i
              command:
              - python3
              - -m
              - launch.cluster.probe
              - --devices=4
              - --run_dir=/mnt/shared/runs/mine
              - --min_free_gib=20
              workingDir: /opt/aamoe_jax
              env:
              - name: JAX_PLATFORMS
                value: tpu
              - name: NODE_NAME
                valueFrom:
                  fieldRef:
                    fieldPath: spec.nodeName
              ports:
              - name: tpu
                containerPort: 8471
              - name: jax
                containerPort: 8482
              - name: megascale
                containerPort: 8080
              resources:
                requests:
                  google.com/tpu: '4'
                limits:
                  google.com/tpu: '4'
              volumeMounts:
              - name: shared
                mountPath: /mnt/shared
            containers:
            - name: main
              image: gcr.io/p/i
              command:
              - python3
              - -m
              - launch.train
              - --gin_file=aamoe.gin
              - --gin_param=TrainingConfig.seed = 1
              - --run_dir=/mnt/shared/runs/mine
              - --distributed=auto
              workingDir: /opt/aamoe_jax
              env:
              - name: JAX_PLATFORMS
                value: tpu
              - name: NODE_NAME
                valueFrom:
                  fieldRef:
                    fieldPath: spec.nodeName
              - name: LIBTPU_INIT_ARGS
                value: --xla_enable_async_all_gather=true --xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true
              ports:
              - name: tpu
                containerPort: 8471
              - name: jax
                containerPort: 8482
              - name: megascale
                containerPort: 8080
              resources:
                requests:
                  google.com/tpu: '4'
                limits:
                  google.com/tpu: '4'
              volumeMounts:
              - name: shared
                mountPath: /mnt/shared
END
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
