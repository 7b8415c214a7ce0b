"""What most people write first: transformers behind FastAPI. `python plain_server.py FOLDER PORT`; serve.py runs it."""

from __future__ import annotations

import sys

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Request(BaseModel):
    inputs: list[str]


def main(folder: str, port: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    app = FastAPI()

    @app.get("/health")
    def health() -> dict:
        return {}

    @app.post("/embed")
    def embed(request: Request) -> list[list[float]]:
        batch = tokenizer(request.inputs, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1).tolist()

    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
