"""Looking inside: what attention does, layer by layer and head by head, and which words decided."""

from fastbert.inspect.attention import AttentionMaps as AttentionMaps
from fastbert.inspect.attention import attention as attention
from fastbert.inspect.attribution import Attribution as Attribution
from fastbert.inspect.attribution import Target as Target
from fastbert.inspect.attribution import integrated_gradients as integrated_gradients
from fastbert.inspect.attribution import label as label
from fastbert.inspect.attribution import span as span
from fastbert.inspect.attribution import token_label as token_label
from fastbert.inspect.measures import HEAD_MEASURES as HEAD_MEASURES
from fastbert.inspect.measures import measure_heads as measure_heads
from fastbert.inspect.measures import rollout as rollout
