#!/bin/bash
# Drafters for SmolLM2-135M-Instruct (or any other target), from nothing to figures, on one GPU.
#   TARGET=SmolLM2-135M-Instruct.Q4_1.gguf PROMPTS="train.jsonl gsm8k_train.jsonl" TESTS="mt_bench.jsonl gsm8k_test.jsonl humaneval.jsonl" \
#       bash scripts/h200/train.sh [PART...]        parts: texts train accept proof speed peers ablate pack
# Two calls of ten minutes on the same machine ($STATE is kept there):
#   bash scripts/h200/train.sh texts train pack                                          (130 + 420 + 15 s)
#   TRAIN_SECONDS=280 bash scripts/h200/train.sh train accept proof speed pack           (280 + 70 + 110 + 15 s)
# then, in whatever is left, `peers` (100 to 150 s: torch.compile) and `ablate` (ABLATE_MINUTES=2: about 200 s).
# One call alone: MINUTES=5 TRAIN_SECONDS=340 bash scripts/h200/train.sh texts train accept pack.
#
# Why these numbers
# - What limits. Four trainings at once make 300,000 tokens/s together where NVIDIA's MPS is installed, which lets their kernels run
#   side by side (2026-11-17; train.py starts it): eagle3 60,000, p_eagle 48,000, dflash 84,000, mtp 108,000. Taking turns, they made
#   145,000. A step of 16,384 tokens, EAGLE-3, K = 7, takes by count 3.2 passes (drafts further ahead are learnt from fewer places),
#   of which about three quarters of the places are the target's own: 39,000 rows for the heads, half of its time.
# - How long. 8.3 minutes of steps (MINUTES; loading and validation are not counted in them) were 1,450 to 3,200 steps; in the last
#   quarter of it accept length rose by 0.01 (mtp), 0.03 (eagle3, dflash) and 0.01 (p_eagle). Rates fall to nothing at the end of
#   MINUTES, so a first call ends in the middle of the course, with the averaged weights as they were at its last
#   validation; the second one goes on with it. Where there will be no second one, say so (MINUTES).
# - Texts. Ten processes write 94,000 tokens/s of the target's own, 9M in 1.3 minutes; the trainings read all texts two to four times.
#   Two of four answers at temperature 0: that is what is asked for at temperature 0, and what it repeats is learnt quickly.
# - Full vocabulary. --draft-vocabulary 16384 would save a third of the heads' time and costs about a hundredth of the tokens, at every
#   place of a draft; and its head would have to be kept (19 MB), where the whole one is the target's own.
# - Layers. What drafts in one pass has that pass only once: three layers for p_eagle and dflash (from 1 to 4 layers P-EAGLE gains
#   46 %, DFlash 6 % a layer, published) cost a step some 3 ms more and a round two layers of thirty. Files of three layers are still
#   small. EAGLE-3 pays for every layer seven times in a round: one. MTP: three modules, as asked for.
# - EAGLE-3 with --post-norm and --loss kl: 2.65 and 2.56 in `ablate` where the base had 2.54 (docs/diary.md).
# - Steps of 16,384 tokens, rows of 1,024, steps that are 3 % of a matrix (MTP 2 %): docs/diary.md. (The last is a middle between targets.
#   On a GPU Qwen2.5-Coder-0.5B was run with it; 1 % and 2 % in short courses only.)
. scripts/h200/steps.sh
step train 595 "$PY" $HERE/train.py "$@"
say "done: ${*:-texts train accept proof speed pack}"
