set -euo pipefail

squeue --me --name=mine --long
