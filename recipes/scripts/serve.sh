#!/usr/bin/env bash
# SGLang servers on this node, one for every TP GPUs, on ports PORT, PORT + 1, ...; they run until this script ends:
#
#     TP=2 recipes/scripts/serve.sh MODEL [option of sglang.launch_server ...]
#
# Run it in SGLang's environment. Weights come from the trainer before the first prompt, so --load-format dummy saves
# reading them here. Options that matter: --enable-deterministic-inference; --enable-memory-saver with
# rollout.colocated=true; --context-length of at least data.max_length.
#
# Whoever reaches a server can change its weights. It listens at ADDRESS, by default all of the node's: with the trainer on
# the same node, ADDRESS=127.0.0.1. KEY_FILE is a file of yours alone with the line "api-key: ..." (docs/rollout.md).
#
# A server that ends is started again, and the trainer sends it the weights. The first pause takes PAUSE seconds, each
# one after it twice as long. After RESTARTS of them without SETTLED seconds of life between, all servers end.
set -euo pipefail
model=${1:?usage: serve.sh MODEL [option ...]}
shift
address=${ADDRESS:-0.0.0.0} key_file=${KEY_FILE:-}
tp=${TP:-1} gpus=${GPUS:-8} port=${PORT:-30000}
restarts=${RESTARTS:-5} first_pause=${PAUSE:-2} settled=${SETTLED:-600}

if [[ $key_file ]]; then
    if [[ ! -f $key_file || ! -r $key_file || $(stat -Lc %a "$key_file") != *00 ]]; then
        echo "serve.sh: KEY_FILE=$key_file must be a file that you alone can read: make it, and chmod 600 it" >&2
        exit 2
    fi
    set -- --config "$key_file" "$@"
fi

keep_up() { # GPUS PORT OPTION...: one server, again and again; ends, with its status, when that is of no use
    local devices=$1 port=$2 count=0 pause=$first_pause began status
    shift 2
    while true; do
        began=$SECONDS status=0
        CUDA_VISIBLE_DEVICES=$devices python -m sglang.launch_server \
            --model-path "$model" --tp "$tp" --host "$address" --port "$port" "$@" || status=$?
        if ((SECONDS - began >= settled)); then count=0 pause=$first_pause; fi
        if ((count == restarts)); then
            echo "serve.sh: the server on port $port ended with status $status and was restarted $count times" \
                "without $settled seconds of life: giving up, all servers end; its own lines above say why" >&2
            exit $((status ? status : 1))
        fi
        count=$((count + 1))
        echo "serve.sh: the server on port $port ended with status $status: restart $count of $restarts in $pause s" >&2
        sleep "$pause"
        pause=$((2 * pause))
    done
}

trap '' USR1 # the job's, by which the trainer saves
trap 'status=$?; trap "" TERM; kill 0; exit $status' EXIT # its own process group, so itself too
for ((first = 0; first + tp <= gpus; first += tp)); do
    keep_up "$(seq -s, "$first" $((first + tp - 1)))" $((port + first / tp)) "$@" &
done
wait -n # until one is given up
