"""Looking inside: what attention does, layer by layer and head by head."""

from fastbert.inspect.attention import AttentionMaps as AttentionMaps
from fastbert.inspect.attention import attention as attention
from fastbert.inspect.measures import HEAD_MEASURES as HEAD_MEASURES
from fastbert.inspect.measures import measure_heads as measure_heads
from fastbert.inspect.measures import rollout as rollout
