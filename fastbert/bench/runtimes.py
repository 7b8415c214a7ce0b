"""ONNX Runtime and OpenVINO as contestants: exported, optimised and quantised once, loaded for one shape or for any."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastbert.bench.jobs import BenchJob, Call, load_peer

EXAMPLE_SHAPE = (2, 16)  # (batch, sequence) of the example that is traced; both stay free
CALIBRATION_BATCHES, CALIBRATION_SHAPE = 16, (4, 128)  # random tokens


class _LastHiddenState(nn.Module):
    """The encoder with plain tensors in and out, for the exporters."""

    def __init__(self, job: BenchJob, attention: str):
        super().__init__()
        self.model = load_peer(job.checkpoint, torch.float32, attention)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        config = self.model.config
        is_decoder = config.model_type in ("qwen3", "gemma3_text")
        mask = decoder_masks(config, input_ids, attention_mask) if is_decoder else attention_mask
        out: torch.Tensor = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        return out


def decoder_masks(config: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> dict[str, Any]:
    """What transformers' decoders make of a mask, a kind of layer each, in operations that exporters know, as its own
    code is not. None where every token sees every other one.
    """
    column = torch.arange(input_ids.shape[1])
    behind = (column[:, None] - column)[None, None]  # how far a key is behind the query
    both_ways, masks = config.model_type == "gemma3_text" and config.use_bidirectional_attention, {}
    for kind in dict.fromkeys(config.layer_types):
        rules = [] if both_ways else [behind >= 0]
        if kind == "sliding_attention":
            rules.append(behind.abs() < config.sliding_window)
        if attention_mask is not None:
            rules.append(attention_mask[:, None, None, :].bool())
        hidden = reduce(torch.logical_and, rules).logical_not() if rules else None
        lowest = torch.finfo(torch.float32).min
        masks[kind] = None if hidden is None else torch.zeros(hidden.shape).masked_fill(hidden, lowest)
    return masks


def _example(job: BenchJob) -> dict[str, torch.Tensor]:
    input_ids = torch.randint(1000, 30000, EXAMPLE_SHAPE, generator=torch.Generator().manual_seed(2))
    return {"input_ids": input_ids, **({"attention_mask": torch.ones_like(input_ids)} if job.masked else {})}


def _calibration_set(job: BenchJob) -> list[dict[str, Any]]:
    """Batches like the benchmark's: padded where those are, since static scales must fit what a mask does to scores.

    Without padding here, BERT-base's cosine to the oracle on the ragged batch was 0.989 instead of 0.9994.
    """
    if job.calibration is not None:
        return _given_set(job, json.loads(job.calibration.read_text(encoding="utf-8")))
    generator, batches = torch.Generator().manual_seed(3), []
    for _ in range(CALIBRATION_BATCHES):
        input_ids = torch.randint(1000, 30000, CALIBRATION_SHAPE, generator=generator)
        lengths = torch.randint(1, CALIBRATION_SHAPE[1] + 1, (CALIBRATION_SHAPE[0], 1), generator=generator)
        mask = (torch.arange(CALIBRATION_SHAPE[1]) < lengths).long()
        batches.append(_feed(input_ids * mask, mask) if job.masked else _feed(input_ids, None))
    return batches


def _given_set(job: BenchJob, texts: list[list[int]]) -> list[dict[str, Any]]:
    """Of texts: one at a time, or padded together with their neighbours."""
    size = CALIBRATION_SHAPE[0] if job.masked else 1
    batches = []
    for start in range(0, len(texts), size):
        some = [torch.tensor(text) for text in texts[start : start + size]]
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in some], batch_first=True)
        batches.append(_feed(nn.utils.rnn.pad_sequence(some, batch_first=True), mask if job.masked else None))
    return batches


def _path(job: BenchJob, variant: str, suffix: str) -> Path:
    return job.prepared / f"{variant}-{'masked' if job.masked else 'unmasked'}{suffix}"


def _feed(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> dict[str, Any]:
    feed = {"input_ids": input_ids.numpy()}
    return feed if attention_mask is None else {**feed, "attention_mask": attention_mask.numpy()}


# --------------------------------------------------------------------------------------------------------------------
# ONNX Runtime


def prepare_onnxruntime(job: BenchJob) -> dict[str, Any]:
    """Export, fuse with ONNX Runtime's transformer optimiser, and for int8 quantise dynamically.

    Always with a mask: without one the optimiser recognises no attention.

    As its pages on transformer optimisation and on quantisation recommend: dynamic quantisation for transformers, after
    the optimiser, weights a channel; 7-bit weights only where there is no VNNI, without which 8-bit sums saturate.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    job, facts = replace(job, masked=True), {}
    fused = _path(job, "onnxruntime-float32", ".onnx")
    if not fused.exists():
        facts = _export_and_fuse(job, fused)
    if job.precision == "int8":
        quantize_dynamic(
            fused,
            _path(job, "onnxruntime-int8", ".onnx"),
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=not torch.cpu._is_vnni_supported(),  # torch has no public name for it yet
            # The fused operators are not ONNX's own, so that its type inference stops at them.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    return facts


def _export_and_fuse(job: BenchJob, target: Path) -> dict[str, Any]:
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    model, example = _LastHiddenState(job, "eager"), _example(job)
    exported, config = target.with_suffix(".exported.onnx"), model.model.config
    # The optimiser knows the graphs of the tracing exporter with eager attention; of the others it fuses no attention.
    with torch.inference_mode():
        torch.onnx.export(
            model,
            tuple(example.values()),
            str(exported),
            input_names=list(example),
            output_names=["last_hidden_state"],
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in (*example, "last_hidden_state")},
            dynamo=False,
        )
    if config.model_type != "bert":  # ONNX Runtime's own optimisations, when it loads the file, are all that there is
        exported.rename(target)
        return {"fused_operators": {}}
    optimised = optimize_model(
        str(exported),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    fused = {name: count for name, count in optimised.get_fused_operator_statistics().items() if count}
    if fused.get("Attention") != config.num_hidden_layers:
        raise RuntimeError(f"no fair contestant: fused {fused}, not {config.num_hidden_layers} attentions")
    optimised.save_model_to_file(str(target))
    exported.unlink()
    return {"fused_operators": fused}


def onnxruntime_file(job: BenchJob) -> Path:
    """What `prepare_onnxruntime` writes."""
    return _path(replace(job, masked=True), f"onnxruntime-{job.precision}", ".onnx")


def onnxruntime_session(job: BenchJob) -> Any:
    """An InferenceSession of what was prepared, which takes input_ids and attention_mask of any shape."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
    return onnxruntime.InferenceSession(str(onnxruntime_file(job)), options, providers=["CPUExecutionProvider"])


def load_onnxruntime(job: BenchJob, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Call:
    session = onnxruntime_session(job)
    feed = _feed(input_ids, torch.ones_like(input_ids) if attention_mask is None else attention_mask)
    return lambda: torch.from_numpy(session.run(None, feed)[0])


# --------------------------------------------------------------------------------------------------------------------
# OpenVINO


def prepare_openvino(variant: str, job: BenchJob) -> dict[str, Any]:
    """Convert from PyTorch, and quantise with NNCF as its documentation says for its two kinds of int8.

    variant "float": nothing more. "weights": nncf.compress_weights in INT8_SYM, the mode made for activations that are
    quantised as they come. "calibrated": nncf.quantize for transformers, static scales of activations from a
    calibration set.
    """
    import openvino

    plain, target = _path(job, "openvino-float", ".xml"), _path(job, f"openvino-{variant}", ".xml")
    if not plain.exists():
        with torch.inference_mode():
            converted = openvino.convert_model(_LastHiddenState(job, "sdpa"), example_input=_example(job))
        openvino.save_model(converted, plain, compress_to_fp16=False)
    if target.exists():
        return {}
    import nncf

    model = openvino.Core().read_model(plain)
    if variant == "weights":
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        batches = _calibration_set(job)
        model = nncf.quantize(
            model,
            nncf.Dataset(batches),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(batches),
        )
    openvino.save_model(model, target, compress_to_fp16=False)
    return {}


def openvino_request(variant: str, job: BenchJob, shape: tuple[int, int] | None) -> Any:
    """An InferRequest of what was prepared, for inputs of one (batch, length), or of any with None.

    For one shape where it is known, since its documentation advises against free dimensions then. A single short text
    takes 0.1 to 0.2 ms less: in calibrated int8, MiniLM and 8 tokens, 0.57 ms instead of 0.76.
    """
    import openvino

    settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}
    if job.precision != "int8":  # what int8 leaves over runs in what OpenVINO itself takes for fastest
        settings["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[job.precision]
    if variant == "weights":
        # Larger groups are faster and less precise. Of 32 (the default), 64, 128, 192, 256, 384 and 768 this is fastest
        # with MiniLM, by 12 to 15 % over the default, and with BERT-base it has 25 % over it.
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 128
    if not job.alone:
        # It binds its threads to cores, and all processes to the same ones: two of one thread each then took 17.0 ms
        # with a text of 64 tokens (MiniLM, bfloat16), and 8.3 without.
        settings["ENABLE_CPU_PINNING"] = False
    core = openvino.Core()
    model = core.read_model(_path(job, f"openvino-{variant}", ".xml"))
    if shape is not None:
        model.reshape({name: list(shape) for name in ("input_ids", *(("attention_mask",) if job.masked else ()))})
    return core.compile_model(model, "CPU", settings).create_infer_request()


def load_openvino(variant: str, job: BenchJob, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Call:
    batch_size, length = input_ids.shape
    request, feed = openvino_request(variant, job, (batch_size, length)), _feed(input_ids, attention_mask)
    return lambda: torch.from_numpy(request.infer(feed, share_inputs=True, share_outputs=True)[0])
