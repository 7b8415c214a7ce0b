#!/bin/sh
# Domain-adaptive masked language modelling (Gururangan et al. 2020): a model that is there already reads texts like
# those that it will meet. all-MiniLM-L6-v2 has no masked-LM head, so it gets a new one, and begins with short texts.
# sh examples/pretrain_domain.sh TEXT [EVAL_TEXT]; MODEL is another one, OPTIONS are of `fastbert pretrain`.
set -e
text=${1:?the text file to learn from}
fastbert pretrain --model "${MODEL:-all-MiniLM-L6-v2}" --train "$text" ${2:+--eval "$2"} --output adapted \
    --unit word --phases 0.9:64,0.1:128 --step-tokens 4096 --learning-rate 1e-4 --epochs 1 $OPTIONS
