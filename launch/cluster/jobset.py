"""What can be done with a JobSet that is in a Kubernetes cluster, however it came there: by kubectl."""

from __future__ import annotations

from launch.cluster import exits, shell

LABEL = "jobset.sigs.k8s.io/jobset-name"
POOL = "cloud.google.com/gke-nodepool"

# A line for every pod: its node, then the exit codes of its containers, the probe's first.
PODS = (
    "{range .items[*]}{.spec.nodeName}"
    "{range .status.initContainerStatuses[*]} {.state.terminated.exitCode}{end}"
    "{range .status.containerStatuses[*]} {.state.terminated.exitCode}{end}"
    r'{"\n"}{end}'
)


def kubectl(project: str, location: str, cluster: str, namespace: str) -> str:
    """A shell function `kubectl` that speaks to one cluster, under the name `gcloud ... get-credentials` gives it."""
    context = shell.words(f"--context=gke_{project}_{location}_{cluster}", f"--namespace={namespace}")
    return f'kubectl() {{ command kubectl {context} "$@"; }}'


def state(name: str) -> str:
    """Shell that prints `JobSet Completed` or `JobSet Failed`, `JobSet ` while one runs, nothing if there is none."""
    return f"kubectl get jobset {name} --ignore-not-found --output=jsonpath='{{.kind}} {{.status.terminalState}}'"


WAIT = 'echo "it runs already, as it was started: waiting for its end" >&2'
REFUSE = f'echo "it runs, and holds its hosts: ask for its status, or stop it" >&2 && exit {exits.UNLAUNCHED.code}'


def make(name: str, create: str, running: str) -> str:
    """Shell that creates a JobSet in the place of one that ended, or does `running` where it runs."""
    return f"""\
if [ "$({state(name)})" = "JobSet " ]; then
  {running}
else
  {delete(name)}
  {create}
fi"""


def wait(name: str) -> str:
    """Shell that waits for the end of a JobSet and exits as its pods did; nodes that failed their probe are named by
    their pools, since the hosts of a slice cannot be replaced one by one."""
    return f"""\
{shell.WORST}

while true; do
  if state=$({state(name)}); then
    case $state in
      "") exit {exits.STOPPED} ;; # somebody deleted it
      "JobSet Completed") exit 0 ;;
      "JobSet Failed") break ;;
    esac
  fi
  sleep 30
done

pods=$(kubectl get pods --selector={LABEL}={name} --output=jsonpath={shell.words(PODS)})
while read -r node codes; do
  if [[ " $codes " == *" {exits.UNHEALTHY} "* ]]; then
    pool=$(kubectl get node "$node" --output=jsonpath='{{.metadata.labels.{POOL.replace(".", chr(92) + ".")}}}')
    echo "unhealthy $pool: the probe failed on $node"
  fi
done <<<"$pods"
cut -s -d ' ' -f 2- <<<"$pods" | tr ' ' '\\n' | grep -vx 0 | worst || exit $?"""


def logs(name: str) -> str:
    """Shell that follows the first pod of the first slice, in all its containers."""
    index = "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    return f"kubectl logs --selector={LABEL}={name},{index} --all-containers --follow --tail=100"


def status(name: str) -> str:
    """Shell that shows a JobSet and its pods."""
    return f"kubectl get jobset {name}\nkubectl get pods --selector={LABEL}={name} --output=wide"


def delete(name: str) -> str:
    """Shell that deletes a JobSet and waits until its pods are gone: they are told to save first."""
    return f"kubectl delete jobset {name} --ignore-not-found --cascade=foreground"
