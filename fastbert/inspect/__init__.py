"""Looking inside: what attention does, layer by layer and head by head, which words decided, and what a word means."""

from fastbert.inspect.ablation import measure_without_each_head as measure_without_each_head
from fastbert.inspect.ablation import without_heads as without_heads
from fastbert.inspect.attention import AttentionMaps as AttentionMaps
from fastbert.inspect.attention import attention as attention
from fastbert.inspect.attention import weighted_attention as weighted_attention
from fastbert.inspect.attribution import Attribution as Attribution
from fastbert.inspect.attribution import Target as Target
from fastbert.inspect.attribution import attention_relevance as attention_relevance
from fastbert.inspect.attribution import integrated_gradients as integrated_gradients
from fastbert.inspect.attribution import label as label
from fastbert.inspect.attribution import similarity as similarity
from fastbert.inspect.attribution import span as span
from fastbert.inspect.attribution import token_label as token_label
from fastbert.inspect.figures import draw_attention as draw_attention
from fastbert.inspect.likelihood import token_log_probs as token_log_probs
from fastbert.inspect.measures import HEAD_MEASURES as HEAD_MEASURES
from fastbert.inspect.measures import measure_heads as measure_heads
from fastbert.inspect.measures import rollout as rollout
from fastbert.inspect.page import Page as Page
from fastbert.inspect.vectors import cosines as cosines
from fastbert.inspect.vectors import hidden_states as hidden_states
from fastbert.inspect.vectors import linear_probe as linear_probe
from fastbert.inspect.vectors import neighbour_accuracy as neighbour_accuracy
from fastbert.inspect.vectors import principal_components as principal_components
from fastbert.inspect.vectors import tokens_of_word as tokens_of_word
from fastbert.inspect.vectors import word_vectors as word_vectors
