"""Questions to a bank, sorted without a label: vectors, k-means, and a map of what was found.

    python examples/gallery/cluster_intents.py banking77_test.csv --clusters 77 --picture map.png

The file's first column is a text; the second, its intent, is only used to say afterwards how pure the clusters are.
Without a file it takes the small one of this repository.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE

import fastbert

parser = argparse.ArgumentParser()
parser.add_argument("texts", nargs="?", type=Path, default=Path(__file__).parents[1] / "data" / "intents.csv")
parser.add_argument("--clusters", type=int, default=8)
parser.add_argument("--picture", type=Path)
options = parser.parse_args()

with open(options.texts, encoding="utf-8", newline="") as file:
    texts, intents = zip(*list(csv.reader(file))[1:], strict=True)
vectors = fastbert.SentenceEncoder("all-MiniLM-L6-v2").encode(list(texts))
means = KMeans(options.clusters, n_init=4, random_state=0).fit(vectors)
inside = np.linalg.norm(vectors - means.cluster_centers_[means.labels_], axis=1)

pure, titles = 0, []
sizes = Counter(means.labels_.tolist())
for cluster, size in sizes.most_common():
    members = np.flatnonzero(means.labels_ == cluster)
    middle = members[inside[members].argmin()]  # the text that is nearest to the cluster's mean
    intent, count = Counter(intents[i] for i in members).most_common(1)[0]
    pure += count
    titles.append((cluster, texts[middle]))
    if len(titles) <= 8:
        print(f"{size:4} texts, {count / size:4.0%} of them {intent}: {texts[middle]}")
print(f"{len(texts)} texts, {pure / len(texts):.1%} in a cluster of which most have the same intent")

if options.picture is not None:
    points = TSNE(metric="cosine", perplexity=min(30, len(texts) / 4), random_state=0).fit_transform(vectors)
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    axis.scatter(*points.T, c="#cfd4da", s=8)
    for cluster, title in titles[:8]:
        axis.scatter(*points[means.labels_ == cluster].T, s=14, label=title[:60])
    axis.set(xticks=[], yticks=[], title="The eight largest clusters, each by its most typical text")
    axis.legend(fontsize=8, loc="best")
    figure.savefig(options.picture, dpi=110)
