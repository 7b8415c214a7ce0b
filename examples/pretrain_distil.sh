#!/bin/sh
# A student of three layers from all-MiniLM-L6-v2, whose six layers teach it (DistilBERT, Sanh et al. 2019).
# A teacher needs a masked-LM head: examples/pretrain_domain.sh TEXT makes `adapted`, which is the teacher here.
# sh examples/pretrain_distil.sh TEXT [EVAL_TEXT]; TEACHER is another one, OPTIONS are of `fastbert pretrain`.
set -e
text=${1:?the text file to learn from}
fastbert pretrain --objective distil --teacher "${TEACHER:-adapted}" --train "$text" ${2:+--eval "$2"} --output student \
    --max-length 64 --step-tokens 4096 --learning-rate 2e-4 --epochs 1 $OPTIONS
