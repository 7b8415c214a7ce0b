"""The model card, and the upload of a saved folder to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastbert.config import EncoderConfig

# The end of a class's name -> the hub's word for what it is for.
_TASKS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}
# Of a class for texts: the hub's word, and what loads its folders, too.
_OF_TEXTS = {
    "SentenceEncoder": ("sentence-similarity", "sentence_transformers.SentenceTransformer"),
    "Reranker": ("text-ranking", "sentence_transformers.CrossEncoder"),
    "SparseEncoder": ("feature-extraction", "sentence_transformers.SparseEncoder"),
    "TextClassifier": ("text-classification", "transformers.AutoModelForSequenceClassification"),
    "TokenClassifier": ("token-classification", "transformers.AutoModelForTokenClassification"),
    "QuestionAnswerer": ("question-answering", "transformers.AutoModelForQuestionAnswering"),
}


def model_card(class_name: str, config: EncoderConfig, repo_id: str, source: str, tags: list[str]) -> str:
    """README.md of a model: what the hub reads, how to load it, and what its authors are to fill in.

    `source`: what the model was loaded from; a hub id becomes base_model.
    """
    from huggingface_hub import ModelCardData

    is_hub_id = source.count("/") == 1 and not source.startswith((".", "~", "/")) and not Path(source).exists()
    auto = "AutoModel" if class_name.endswith("Model") else f"AutoModelFor{class_name.rpartition('For')[2]}"
    task = next((task for end, task in _TASKS.items() if class_name.endswith(end)), None)
    task, other = _OF_TEXTS.get(class_name, (task, f"transformers.{auto}"))
    data = ModelCardData(
        library_name=other.partition(".")[0].replace("_", "-"),
        pipeline_tag=task,
        base_model=source if is_hub_id else None,
        tags=list(dict.fromkeys([*tags, "fastbert"])),
    )
    labels = ", ".join(config.id2label[i] for i in sorted(config.id2label)[:20])
    lines = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {repo_id.rpartition('/')[2]}\n",
        f"`{class_name}` with {config.num_hidden_layers} layers of width {config.hidden_size}, saved by fastbert. "
        + (f"It was made from `{source}`.\n" if is_hub_id else "\n"),
        "```python\nimport fastbert\n",
        f'model = fastbert.{class_name if class_name in _OF_TEXTS else auto}.from_pretrained("{repo_id}")',
        "```\n",
        f"`{other}` loads it, too.\n",
        *([f"Labels: {labels}\n"] if task in ("text-classification", "token-classification") else []),
        "## Training data and evaluation\n\nTo be filled in by its authors.\n",
    ]
    return "\n".join(lines)


def push(
    folder: Path,
    repo_id: str,
    make_card: Callable[[str, Any], str],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | str | None = None,
) -> str:
    """Upload a folder to a repository, which is made if it is not there; the address of the commit.

    A card is written into the folder unless there is one, or the repository has one.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
    if not (folder / "README.md").exists() and not api.file_exists(repo_id, "README.md"):
        (folder / "README.md").write_text(make_card(repo_id, tags), encoding="utf-8")
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message="Upload model" if commit_message is None else commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
        ignore_patterns=[".*"],
    )
