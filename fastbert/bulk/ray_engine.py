"""Ray Data's part: a pool of workers, one a GPU or a group of cores, which starts a dead one again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastbert.bulk.blocks import absolute, make_plan
from fastbert.bulk.worker import BlockWorker, Worker, WorkerSettings
from fastbert.errors import ConfigError, InputError
from fastbert.messages import install
from fastbert.native.cores import cores

if TYPE_CHECKING:
    from ray.data import Dataset

CORES = 4  # of a worker without a GPU: a model in memory for each four
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would report to its makers
    # Where a Ray that we start may wait, it waits for a busy machine; its 30 s for a node cannot be changed.
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
}
LOCAL_STORE_BYTES = 100_000_000  # of a Ray that we start: rows and vectors do not go through it


class Pool(NamedTuple):
    """So many workers, each with these resources. `threads` compute in each; Ray counts `cpus`."""

    workers: int
    cpus: float
    gpus: int
    threads: int
    device: str


def import_ray() -> Any:
    """ray. Raises ConfigError if it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"this needs Ray ({error}): {install('ray')}") from None
    return ray


def start_ray() -> Any:
    """ray, connected: to the cluster of RAY_ADDRESS, or to one that is started on this machine.

    Raises ConfigError if it does not start or is not reached.
    """
    ray = import_ray()
    if not ray.is_initialized():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        local: dict[str, Any] = (
            {}
            if os.environ.get("RAY_ADDRESS")
            else {
                "num_cpus": cores().usable,
                "include_dashboard": False,
                "object_store_memory": LOCAL_STORE_BYTES,
            }
        )
        try:
            ray.init(log_to_driver=False, logging_level="error", **local)
        except Exception as error:  # it raises Exception itself, among others
            what = (
                "Ray did not start on this machine; it gives itself 30 s for that, which a busy machine may exceed: try"
                " again when less runs, or start a cluster and set RAY_ADDRESS"
                if local
                else f"the Ray cluster of RAY_ADDRESS={os.environ['RAY_ADDRESS']} was not reached"
            )
            raise ConfigError(f"{what} ({' '.join(str(error).split())[:300]})") from error
    return ray


def make_pool(resources: dict[str, float], workers: int | None, device: str | None, spare_cpus: float) -> Pool:
    """Workers for what a cluster has: one a GPU, or one for every CORES cores; `spare_cpus` are left to others.

    Raises InputError for a device that is not a kind of device, or a number of workers below 1.
    """
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device {device!r}: with Ray it is cpu or cuda, and Ray says which one")
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}; it must be at least 1")
    gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 1.0)
    free = max(cpus - spare_cpus, 0.5)
    if device == "cuda" or (device is None and gpus):
        if not gpus:
            raise InputError("device 'cuda': the cluster has no GPU")
        if workers is not None and workers > gpus:
            raise InputError(f"workers is {workers}; the cluster has {gpus} GPUs")
        count = workers or gpus
        each = min(CORES, free / count)
        return Pool(count, each if each < 1 else int(each), 1, max(1, int(each)), "cuda")
    count = workers or max(1, int(free // CORES))
    each = free / count
    return Pool(count, each if each < 1 else int(each), 0, max(1, int(each)), "cpu")


def ray_encode(
    dataset: Dataset,
    model: str,
    *,
    column: str = "text",
    output_column: str = "embedding",
    dtype: str = "auto",
    device: str | None = None,
    workers: int | None = None,
    batch_tokens: int | None = None,
    normalize: bool | None = None,
    prompt_name: str | None = None,
) -> Dataset:
    """The Ray dataset with a column of vectors, of a model that each worker loads once. Nothing runs until it is read.

    The vectors of a block of the dataset have the bits of `SentenceEncoder.encode_stream` over its texts with
    `chunk_texts=1024`, whichever worker computes them and however often.

    Args:
        dataset: from `ray.data`, with a column of texts. One of the cluster's CPUs is left to read it.
        model: a folder that every node has, a hub id, or a name in fastbert.hub.PACKAGED_MODELS.
        column: the texts. output_column: the vectors, lists of float32 of a fixed size.
        dtype: as SentenceEncoder.from_pretrained has it.
        device: "cuda" or "cpu". The default is the cluster's GPUs if it has any.
        workers: how many. The default is one a GPU, or one for every 4 cores.
        batch_tokens, normalize, prompt_name: as SentenceEncoder.encode has them.

    Raises:
        ConfigError: Ray is not installed. InputError: an option is out of bounds.
    """
    ray = start_ray()
    pool = make_pool(ray.cluster_resources(), workers, device, 1.0)
    settings = WorkerSettings(
        model=absolute(model) if Path(model).is_dir() else model,
        column=column,
        output_column=output_column,
        dtype=dtype,
        device=pool.device,
        batch_tokens=batch_tokens,
        normalize=normalize,
        prompt_name=prompt_name,
        threads=pool.threads,
    )
    kwargs = {"settings": settings}
    whole: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}  # a block at a time
    return dataset.map_batches(Worker, fn_constructor_kwargs=kwargs, **whole, **_options(ray, pool))


def encode_files(
    source: str,
    output: str,
    *,
    settings: Callable[[Pool], WorkerSettings],
    identity: dict[str, Any],
    device: str | None,
    workers: int | None,
    force: bool,
    on_plan: Callable[[int, int, Pool], None],
    on_block: Callable[[dict[str, Any]], None],
) -> int:
    """Encode parquet files into a folder with a file a block; returns how many texts this run has encoded.

    `on_plan(all texts, those of earlier runs, pool)` is called at the start, `on_block` after each
    with what BlockWorker says of it.
    Raises InputError as make_plan and Worker.encode do; blocks that were finished by then stay.
    """
    ray = start_ray()
    pool = make_pool(ray.cluster_resources(), workers, device, 0.0)
    chosen = settings(pool)
    plan = make_plan(source, output, chosen.column, identity, pool.workers, force)
    left = plan.left
    texts = sum(block.stop - block.start for block in left)
    on_plan(plan.texts, plan.texts - texts, pool)
    if not left:
        return 0
    pool = pool._replace(workers=min(pool.workers, len(left)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the caller says what there is to say
    blocks = ray.data.from_items([asdict(block) for block in left], override_num_blocks=len(left))
    kwargs = {"settings": chosen, "source": absolute(source), "output": absolute(output)}
    for done in blocks.map(BlockWorker, fn_constructor_kwargs=kwargs, **_options(ray, pool)).iter_rows():
        if done["error"]:
            raise InputError(done["error"])
        on_block(done)
    return texts


def _options(ray: Any, pool: Pool) -> dict[str, Any]:
    # One task at a time: a worker that has two keeps the second from one that has none.
    compute = ray.data.ActorPoolStrategy(size=pool.workers, max_tasks_in_flight_per_actor=1)
    options: dict[str, Any] = {"compute": compute, "num_cpus": pool.cpus}
    return {**options, "num_gpus": pool.gpus} if pool.gpus else options
