set -euo pipefail

tail -n 100 -F "$HOME/aamoe_jobs/mine.log"
