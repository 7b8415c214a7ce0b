"""fastbert.graphs(model): CUDA graphs for inference on batches so small that launching their kernels takes the time.

A graph replays the kernels of one shape. Batches have many shapes, so they are rounded up to buckets. The tokens of a
batch are copied to the front of a bucket's own buffers; the rows behind them are padding, and cu_seqlens continues with
empty sequences. Every op defines both. A bucket's graph is captured when it is first used. Checks and packing run
before the graph, because they ask the host; unpacking and the pooler run after it. Calls that a graph cannot serve, or
would not make faster, run in the model itself. Captured steps of training (fastbert.training.graphed) share capture,
buckets and buffers with it.
"""

from __future__ import annotations

from fastbert.cuda_graphs.encoder import GraphedEncoder
from fastbert.models.base import EncoderModel

__all__ = ["GraphedEncoder", "graphs"]


def graphs(
    model: EncoderModel, *, max_tokens: int = 8192, max_graphs: int = 32, max_memory: int = 2 << 30
) -> GraphedEncoder:
    """CUDA graphs for inference. Call the result as you call `model`, under torch.no_grad() or inference_mode().

    Graphs see weights that change in place. If a weight is replaced, the next call captures a new graph.

    Args:
        model: a fastbert encoder (a base model, without a head), in eval mode, on a GPU. Elsewhere it runs as it is.
        max_tokens: batches with more real tokens run without a graph. Launching takes little time beside their kernels.
        max_graphs: how many graphs are kept. Beyond it, the graph that was not used for the longest time is freed.
        max_memory: how many bytes of GPU memory the graphs may hold, with the same rule.

    Raises:
        TypeError: the model has a head; wrap its `base_model`. ValueError: a bound is below 1.
    """
    return GraphedEncoder(model, max_tokens, max_graphs, max_memory)
