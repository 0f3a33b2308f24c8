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
# - What limits. Four trainings at once made 145,000 tokens/s together, 25,000 to 48,000 each: a quarter of the GPU each, so that
#   "four minutes" were one. A step of 16,384 tokens, EAGLE-3, K = 7, takes by count: 3.2 passes (7 before; drafts further ahead are
#   learnt from fewer places) of which about three quarters of the places are the target's own: 39,000 rows for the heads. Over
#   49,152 tokens a row costs 3 products of 57 MFLOP (the drafter's logits, the target's, the gradient) and about 0.6 MB of logits
#   written and read: 6.7 TFLOP and 23 GB, 20 to 25 ms; the target's pass 4.4 TFLOP, 15 to 20 ms; the drafter's layers and
#   attention of branches 20 to 30 ms. Together 60 to 75 ms, 220,000 to 270,000 tokens/s alone on the GPU, where it was 150 ms. The host needs
#   15 to 20 ms a step (2,100 operations), and waits for the GPU once in it (to leave out rows that nobody asks for), so that one
#   training keeps the GPU busy by itself, or nearly. More of them at once bring no more in
#   sum, but nothing is lost while one of them loads, validates or packs texts. Hence all four side by side.
# - How long. The 420 and 280 s above are 9 minutes of steps (MINUTES; loading and validation are not counted in them): of four, 2 1/4
#   GPU-minutes each, with 1.3 minutes of writing shared by all. At 55,000 to 65,000 tokens/s each that is 32M tokens, 2,000 steps:
#   five times as many as in the run whose curves still rose steeply. Whoever has more time should give it to this. Rates fall to
#   nothing at the end of MINUTES, so a first call ends in the middle of the course, with the averaged weights as they were at its last
#   validation; the second one goes on with it. Where there will be no second one, say so (MINUTES).
# - Texts. 2.1M tokens were read three times in 400 steps; 2,000 steps would read them 16 times. The host takes 25 us a token and
#   process, so ten processes write up to 400,000 tokens/s as far as the GPU goes along: 15M to 25M tokens in 1.3 minutes, read once or
#   twice. Two of four answers at temperature 0: that is what is asked for at temperature 0, and what it repeats is learnt quickly.
# - Full vocabulary. --draft-vocabulary 16384 would save a third of the heads' time and costs about a hundredth of the tokens, at every
#   place of a draft; and its head would have to be kept (19 MB), where the whole one is the target's own.
# - Layers. What drafts in one pass has that pass only once: three layers for p_eagle and dflash (from 1 to 4 layers P-EAGLE gains
#   46 %, DFlash 6 % a layer, published) cost a step some 3 ms more and a round two layers of thirty. Files of three layers are still
#   small. EAGLE-3 pays for every layer seven times in a round: one. MTP: three modules, as asked for.
# - Steps of 16,384 tokens, rows of 1,024, Muon at 0.02, --loss mixed: what docs/diary.md found best, or did not find worse.
#   EAGLE3="--post-norm" is open: SmolLM2's states are 23 large where the drafter reads them, and 940 at the first token of a text, and it
#   norms every tap. In 40 steps on a CPU its first place learnt more slowly, and its third one faster (docs/diary.md); `ablate` has it.
. scripts/h200/steps.sh
step train 595 "$PY" $HERE/train.py "$@"
say "done: ${*:-texts train accept proof speed pack}"
