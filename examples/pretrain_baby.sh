#!/bin/sh
# A baby BERT from a text file, on a CPU in minutes: a paragraph a line, a blank line between documents.
# sh examples/pretrain_baby.sh TEXT [EVAL_TEXT]; other options of `fastbert pretrain` go into OPTIONS.
set -e
text=${1:?the text file to learn from}
fastbert pretrain --preset baby --train "$text" ${2:+--eval "$2"} --output baby \
    --step-tokens 2048 --learning-rate 3e-3 $OPTIONS
fastbert fill-mask "She looked at him and [MASK] nothing." --model baby
