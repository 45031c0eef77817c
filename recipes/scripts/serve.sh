#!/usr/bin/env bash
# SGLang servers on this node, one for every TP GPUs, on ports PORT, PORT + 1, ...; they run until this script ends:
#
#     TP=2 recipes/scripts/serve.sh MODEL [option of sglang.launch_server ...]
#
# Run it in SGLang's environment. Weights come from the trainer before the first prompt, so --load-format dummy saves
# reading them here. Options that matter: --enable-deterministic-inference; --enable-memory-saver with
# rollout.colocated=true; --context-length of at least data.max_length.
set -euo pipefail
model=${1:?usage: serve.sh MODEL [option ...]}
shift
tp=${TP:-1} gpus=${GPUS:-8} port=${PORT:-30000}
trap '' USR1 # the job's, by which the trainer saves
trap 'status=$?; trap "" TERM; kill 0; exit $status' EXIT # its own process group, so itself too
for ((first = 0; first + tp <= gpus; first += tp)); do
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + tp - 1))) python -m sglang.launch_server \
        --model-path "$model" --tp "$tp" --host 0.0.0.0 --port $((port + first / tp)) "$@" &
done
wait -n # a server that dies ends them all: the job's log says which
