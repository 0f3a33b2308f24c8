#!/bin/bash
# The drafters of the embedded default, made anew on one GPU and measured: EAGLE-3, and two that draft in one pass. About 4 minutes.
#   bash scripts/h200/default.sh [OPTIONS of make_default.py drafters]        -> $OUT/default.tar.xz: a folder for each
# With WORK=FOLDER texts that are there are used again, and training that was broken off goes on (LIMIT: seconds until it is); with
# --texts-only texts are all that is made.
# The processes share the GPU by NVIDIA's MPS where it is installed; otherwise they take turns.
. scripts/h200/steps.sh
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK/default"
METHODS=${METHODS:-eagle3,p_eagle,dflash}
SMALL=(--processes 1 --prompts 64 --generate-minutes 0.1 --steps 3 --tokens-per-step 1024 --row-len 128 256)
[ -n "$SMOKE" ] || SMALL=()
if command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps
    mkdir -p "$WORK/mps" && nvidia-cuda-mps-control -d 2>/dev/null
fi
step drafters "${LIMIT:-420}" "$PY" scripts/make_default.py drafters --data "$WORK/data" --out "$WORK/default" --methods "$METHODS" \
    ${SMALL[@]+"${SMALL[@]}"} "$@" >"$WORK/drafters.log"
grep -E "accept length|after|^data|^training" "$WORK/drafters.log"
for folder in "$WORK"/default/*/; do
    [ -d "$folder" ] || continue
    say "measured: $(basename "$folder")"
    step measure 120 "$PY" scripts/make_default.py --drafter "$folder" measure | grep -v "^ *$" | head -n 8
done
tar cJf "$OUT/default.tar.xz" -C "$WORK" default
say "done: $(du -h "$OUT/default.tar.xz" | cut -f1) in $OUT/default.tar.xz"
