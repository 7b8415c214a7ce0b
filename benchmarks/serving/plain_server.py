"""What most people write first: transformers behind FastAPI; load.py runs it.

`plain_server.py FOLDER DTYPE many|one PORT`. many: as many requests at a time as FastAPI has threads. one: a lock
around the model, with which the threads do not get in each other's way.
"""

from __future__ import annotations

import contextlib
import sys
import threading

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Request(BaseModel):
    inputs: list[str]


def main(folder: str, dtype: str, at_a_time: str, port: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    turn = {"many": contextlib.nullcontext, "one": threading.Lock}[at_a_time]()
    app = FastAPI()

    @app.get("/health")
    def health() -> dict:
        return {}

    @app.post("/embed")
    def embed(request: Request) -> list[list[float]]:
        batch = tokenizer(request.inputs, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with turn, torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled.float(), dim=-1).tolist()

    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
