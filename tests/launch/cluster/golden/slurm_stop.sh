set -euo pipefail

scancel --me --name=mine --state=PENDING
scancel --me --name=mine --state=RUNNING --signal=INT
