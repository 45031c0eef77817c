#!/usr/bin/env bash
# One torchrun agent on every node; run the same line on each (or through srun, see sft.slurm):
#
#     HEAD=node0 NODES=2 GPUS=8 recipes/scripts/multi_node.sh sft preset=32b_h100 model.path=DIR data.train=FILE
#
# HEAD is the host name of one of the nodes, reachable from all; PORT any free port on it. NODES=1:4 with RESTARTS and
# checkpoint.resume=true: the run goes on with the nodes that are left, and with those that join. SIGTERM and SIGUSR1
# have the ranks save and end (docs/reliability.md); after SIGTERM torchrun gives them
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds, by default 30.
set -euo pipefail
: "${HEAD:?set HEAD to the host name of one node}" "${NODES:?set NODES to the number of nodes}"
recipe=${1:?usage: multi_node.sh RECIPE [key=value ...]}
shift
# Without this, ranks that are restarted can read the addresses of their dead predecessors from the agent's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
trap '' USR1 # which would end the agent; the ranks handle it
exec torchrun --nnodes "$NODES" --nproc_per_node "${GPUS:-8}" --rdzv_backend c10d \
    --rdzv_endpoint "$HEAD:${PORT:-29500}" --rdzv_id "${JOB:-isoloss}" --max_restarts "${RESTARTS:-0}" \
    -m "isoloss.recipes.$recipe" "$@"
