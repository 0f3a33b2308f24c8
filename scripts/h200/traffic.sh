#!/bin/bash
# The claims about traffic, on one GPU: Llama-3.1-8B's shape with random weights, EAGLE-3 with K = 5, acceptance made up.
#   bash scripts/h200/traffic.sh [PART...]     parts: startup certify never depth guided equal round http; none: all of them
# Minutes on an H200, all together: about 5 1/2. Start-up cold (and certify, which hardly uses the GPU, beside it) 100 s, warm
# 25, never + depth + guided 140 (two engines, made once), round 25, equal 10, http 90.
PARTS=("$@")
. scripts/h200/steps.sh
KERNELS=$(mktemp -d)
export CACHE=$KERNELS/engine
mkdir -p "$CACHE" "$KERNELS/certify"

if wanted certify; then # in a cache of its own: the start beside it is to be cold
    size="--exact --dtype bfloat16 --max-tokens 72"
    [ -n "$SMOKE" ] && size="--exact --quick --max-tokens 6"
    wanted startup && export WAIT_FOR=$LOGS/certified
    (
        export TRITON_CACHE_DIR=$KERNELS/certify/triton XDG_CACHE_HOME=$KERNELS/certify
        timeout 240 "$PY" -m outrider certify $size --json >"$LOGS/certify.json" 2>"$LOGS/certify.err" || say "FAILED certify (status $?)"
        "$PY" $HERE/certificate.py "embedded pair" "$LOGS/certify.json" 100000
        touch "$LOGS/certified"
    ) &
    CERTIFYING=$!
fi
wanted startup && step startup 330 "$PY" $HERE/traffic.py startup
wanted certify && wait $CERTIFYING
export TRITON_CACHE_DIR=$CACHE/triton XDG_CACHE_HOME=$CACHE # what the start compiled is there for all others
shared=()
for part in never depth guided; do wanted $part && shared+=("$part"); done
[ ${#shared[@]} -gt 0 ] && step engines 420 "$PY" $HERE/traffic.py "${shared[@]}"
wanted round && step round 90 "$PY" $HERE/traffic.py round
wanted equal && step equal 60 "$PY" $HERE/traffic.py equal
wanted http && step http 180 "$PY" $HERE/traffic.py http
say "done: ${*:-all parts}"
rm -rf "$KERNELS"
