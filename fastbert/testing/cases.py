"""One list of cases for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Lengths:
    """The sequence lengths of one packed batch."""

    id: str
    lengths: tuple[int, ...]
    padding_rows: int = 0  # rows beyond cu_seqlens[-1]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32)

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths) + self.padding_rows


# Lengths 1, tile size and tile size +- 1 (16 and 32 are the smallest tiles), ragged, empty sequences, nothing at all.
LENGTHS = (
    Lengths("one-token", (1,)),
    Lengths("equal", (16, 16, 16)),
    Lengths("tile-edges", (15, 16, 17, 31, 32, 33)),
    Lengths("ragged", (3, 41, 1, 7, 40, 12)),
    Lengths("with-empty", (0, 5, 0, 0, 9, 0)),
    Lengths("slack", (4, 0, 6), padding_rows=3),
    Lengths("all-empty", (0, 0)),
)

# The ragged batch of 32 sequences: log-normal like sentences of mixed text, mean 55, max 167.
RAGGED_32 = Lengths(
    "32-ragged",
    (
        167, 8, 72, 31, 45, 118, 22, 61, 38, 90, 14, 53, 29, 76, 41, 139,
        34, 19, 66, 48, 26, 103, 57, 12, 36, 81, 24, 50, 43, 64, 33, 60,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A padded batch that `fastbert bench` times."""

    id: str
    lengths: tuple[int, ...]

    @property
    def masked(self) -> bool:
        """Whether there is padding; where there is none, everyone may take the path without a mask."""
        return len(set(self.lengths)) > 1

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and attention_mask (batch, longest), padded on the right; the same at every call."""
        generator = torch.Generator().manual_seed(1)
        lengths = torch.tensor(self.lengths)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return torch.randint(1000, 30000, mask.shape, generator=generator) * mask, mask


WORKLOADS = (
    Workload("1x16", (16,)),
    Workload("1x128", (128,)),
    Workload("8x128", (128,) * 8),
    Workload("4x512", (512,) * 4),
    Workload("32-ragged", RAGGED_32.lengths),
    Workload("1x2048", (2048,)),
    Workload("1x8192", (8192,)),
)

# Fields of the configs of the benchmark's encoders, BERT's where no model_type stands; the weights are random.
MODELS: dict[str, dict[str, Any]] = {
    "albert-base": {
        "model_type": "albert",
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-base-2048": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
    },
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
    "deberta-v3-base": {
        "model_type": "deberta-v2",
        "vocab_size": 128100,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "distilbert-base": {
        "model_type": "distilbert",
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    # Six of 24 layers, with one of each kind of attention among them, and a smaller word table: a rate is a layer's.
    "embeddinggemma-6-layers": {
        "model_type": "gemma3_text",
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "intermediate_size": 1152,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "max_position_embeddings": 2048,
    },
    "electra-base": {
        "model_type": "electra",
        "embedding_size": 768,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "modernbert-base": {
        "model_type": "modernbert",
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
    },
    "mpnet-base": {
        "model_type": "mpnet",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 514,
    },
    "nomic-base": {
        "model_type": "nomic_bert",
        "vocab_size": 30528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
    },
    # Two of Qwen3-Embedding-0.6B's 28, which are all alike: an ONNX file of all is over the format's 2 GB.
    "qwen3-0.6b-2-layers": {
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "max_position_embeddings": 2048,
    },
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}

# (rows, hidden_size) for row-wise kernels: one row, odd rows, sizes off and on a vector width, BERT's own.
ROWS = ((0, 64), (1, 64), (3, 80), (17, 33), (33, 384), (5, 768), (2, 1024))

MASKS = ("none", "right", "left", "holes", "heavy", "all")


def attention_mask(pattern: str, batch_size: int, seqlen: int, seed: int = 0) -> torch.Tensor | None:
    """An int64 (batch_size, seqlen) mask of one of the patterns of `MASKS`; "all" has one fully masked row."""
    if pattern == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, seqlen + 1, (batch_size,), generator=generator)
    lengths[0] = seqlen
    column = torch.arange(seqlen).expand(batch_size, -1)
    if pattern == "right" or pattern == "all":
        mask = column < lengths[:, None]
    elif pattern == "left":
        mask = column >= seqlen - lengths[:, None]
    elif pattern == "holes":
        mask = (torch.rand(batch_size, seqlen, generator=generator) < 0.7) | (column == 0)
    elif pattern == "heavy":
        mask = column < torch.minimum(lengths, torch.tensor(2))[:, None]
    else:
        raise ValueError(f"unknown mask pattern {pattern!r}; valid patterns: {', '.join(MASKS)}")
    if pattern == "all":
        mask = mask.clone()
        mask[-1] = False
    return mask.long()
