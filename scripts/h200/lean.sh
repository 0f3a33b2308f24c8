#!/bin/bash
# The claims about steps and rounds in 16, 8 and 4 bits, batch 1, random weights, on one GPU: a line for each figure.
#   bash scripts/h200/lean.sh [GROUP...]       groups: those of lean.py, and accept certify-int4 certify-fp8; none: all
# On an H200 with an empty cache of kernels about 3 minutes: 80 s in which all groups compile side by side, then 5 to 10 s each.
PARTS=("$@")
. scripts/h200/steps.sh
step lean 330 "$PY" $HERE/lean.py "$@"
say "done: ${*:-all groups}"
