"""How a call of a model runs: the ways in order, each of which answers or gives its reason.

1. The whole encoder, from ids to what is made of its last hidden state, as one op.
2. In steps: stretches of layers as one op each; a layer by itself where something waits between two of them.

A `Tree` says what the model's tree is now: it is asked once a call. Reasons go to `status`.
"""

from __future__ import annotations

from typing import Any

from fastbert import ops
from fastbert.execution.calls import WHOLE
from fastbert.execution.request import NOTHING_ELSE, EncoderInputs, EncoderOutput, PackedIds, Wanted
from fastbert.execution.steps import Steps
from fastbert.execution.tree import Tree
from fastbert.layers.leaves import get_leaf


def run(tree: Tree, inputs: EncoderInputs, wanted: Wanted = NOTHING_ELSE) -> EncoderOutput:
    """A forward pass of checked inputs."""
    output = None
    if wanted.is_of_layers:
        tree.note(WHOLE, "what layers give is wanted, too")
    elif not tree.was_refused:
        output = at_once(tree, PackedIds.of_inputs(inputs), wanted.pooler)
    return Steps(tree, inputs, wanted).run() if output is None else output


def at_once(
    tree: Tree, ids: PackedIds | None, pools: bool = False, pooling: str = "none", normalizes: bool = False
) -> EncoderOutput | None:
    """A forward pass as one op; None where it cannot be one, for the reason that is noted, or there are no such ids.

    pools: the pooler's output, too. pooling: "mean" or "cls", and `packed` is what ops.pooling makes of the last hidden
    state, and with `normalizes` ops.normalize of that; "none": the state itself.
    """
    if ids is None:
        return None
    tree.was_refused = True  # until it is served: it is not asked again
    word = get_leaf(tree.root, tree.config.embeddings.word)._parameters.get("weight")
    if word is None:
        tree.note(WHOLE, f"{tree.config.embeddings.word} is called")
        return None

    def find_operands() -> ops.EncoderOperands | str:
        held = tree.snapshot().encoder(tree.root)
        return held if isinstance(held, str) else ops.EncoderOperands(held, tree.infers)

    call: Any = ops.try_fused("encoder", word, find_operands)
    if isinstance(call, str):
        tree.note(WHOLE, call)
        return None
    arguments = ids.input_ids, ids.token_type_ids, ids.position_ids, ids.batch.cu_seqlens
    try:
        packed, pooled = call(*arguments, pooling, normalizes, pools)
    except IndexError:
        tree.note(WHOLE, "an id is in no table, a text is too long, or tensors have several dtypes")
        return None
    tree.calls.ways = {WHOLE: ""}  # no trace comes here
    return EncoderOutput(packed, pooled=pooled)
