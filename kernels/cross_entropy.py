"""Linear + softmax cross-entropy over the tokens that have a label; the logits of all of them never exist at once.

    z = h weight^T + bias,  lse = log sum exp z,  n labelled tokens
    loss = 1/n sum (1 - s)(lse - z_label) + s (lse - mean z) + z_loss lse^2
    dz   = ((1 + 2 z_loss lse) softmax(z) - (1 - s) onehot - s / V) / n

Label smoothing s after Szegedy et al. 2016, section 7; z_loss after Chowdhery et al. 2022, section 5. Tokens go through
in chunks: torch's GEMM makes a chunk's logits, one kernel turns them into losses and, in place, into their gradients,
and two more GEMMs use these up at once, since the loss is a number: backward only scales what is there already.

n is counted on the device, and tokens without a label go through with the others, for a loss and gradients of 0: no
size and no number of a launch depends on a label, so a CUDA graph serves any labels. Where few tokens have one, the
caller picks these (their number is a size then), and fills up with tokens without a label.
"""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2

_BLOCK_LABELS = 4096  # of the one program that counts them: 65,536 are 16 steps
_CHUNK_ELEMENTS = 1 << 26  # of a chunk's logits: 128 MB of bf16, and products large enough for the whole GPU


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _share_of_a_label_kernel(labels_ptr, share_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """share (), fp32: 1 / n of the n labels (rows,) that are not ignore_index; 1 where there are none."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + at, mask=at < rows, other=ignore_index)
        counts += (label != ignore_index).to(tl.int32)
    count = tl.maximum(tl.sum(counts, axis=0), 1)
    tl.store(share_ptr, 1.0 / count.to(tl.float32))


@triton.jit(do_not_specialize=["ignore_index"])
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, share_ptr, num_classes, stride, ignore_index, label_smoothing, z_loss,
    NEEDS_GRAD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """losses (rows,), fp32, of logits (rows, num_classes), which NEEDS_GRAD overwrites with their gradients.

    `stride` is num_classes rounded up to whole 16-byte loads: what lies between is read, and left out. Its gradients
    are 0: oneDNN with AMX multiplies whole blocks of columns, and NaN times 0 is NaN. A label that is no class gives
    NaN, and reads nothing; ignore_index gives 0, whatever the logits are. `share` is what one label is of the mean.

    Gradients overwrite what they are made of, so no thread may still want to read what another stores. The label's
    logit is read by all threads, and stored by one: a barrier stands between. All other reads need none. In the second
    loop the thread that stores an element has read it (what others read of it, where a block is smaller than the
    program, is not stored), and the first loop's reads are over when anyone stores: what is stored is made of the row's
    maximum and sum, which are made of all that was read.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    lane_max = tl.full([BLOCK_V], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_V], tl.float32)
    plain = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, stride, BLOCK_V):  # each lane its own online softmax; they are joined once
        columns = start + tl.arange(0, BLOCK_V)
        inside = columns < num_classes
        z = tl.load(logits_ptr + columns, mask=columns < stride, other=0.0).to(tl.float32)
        z = tl.where(inside, z, float("-inf"))
        new_max = tl.maximum(lane_max, z)
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(lane_max - finite) + tl.exp(z - finite)
        lane_max = new_max
        plain += tl.where(inside, z, 0.0)
    row_max = tl.max(lane_max, axis=0)
    row_sum = tl.sum(row_sum * tl.exp(lane_max - row_max), axis=0)
    lse = row_max + tl.log(row_sum)
    # A label that is no class reads nothing and makes the loss NaN, and the gradients with it.
    is_class = (label >= 0) & (label < num_classes)
    right = tl.load(logits_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
    mean = tl.sum(plain, axis=0) / num_classes
    loss = (1.0 - label_smoothing) * (lse - right) + label_smoothing * (lse - mean) + z_loss * lse * lse
    counts = label != ignore_index
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))
    if NEEDS_GRAD:
        tl.debug_barrier()
        share = tl.load(share_ptr)
        factor = tl.where(is_class, (1.0 + 2.0 * z_loss * lse) / row_sum, float("nan"))
        for start in range(0, stride, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            z = tl.load(logits_ptr + columns, mask=columns < stride, other=0.0).to(tl.float32)
            gradient = factor * tl.exp(z - row_max) - label_smoothing / num_classes
            gradient -= tl.where(columns == label, 1.0 - label_smoothing, 0.0)
            gradient = tl.where(counts & (columns < num_classes), gradient * share, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < stride)


def cross_entropy(hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss, needs_grad):
    """-> loss (fp32 scalar), dhidden_states, dweight, dbias for a loss's gradient of 1; fastbert/ops/loss.py."""
    count, num_classes = hidden_states.shape[0], weight.shape[0]
    losses = hidden_states.new_empty(count, dtype=torch.float32)
    share = hidden_states.new_empty((), dtype=torch.float32)
    with torch.cuda.device_of(labels):
        _share_of_a_label_kernel[(1,)](labels, share, count, ignore_index, BLOCK=_BLOCK_LABELS)
    dhidden = torch.empty_like(hidden_states) if needs_grad else hidden_states.new_empty(0)
    dweight = dbias = None
    chunk = max(1, _CHUNK_ELEMENTS // num_classes)
    stride = cdiv(num_classes, 64) * 64
    block_v = min(4096, max(16, next_power_of_2(num_classes)))
    memory = hidden_states.new_empty(min(count, chunk), stride)
    for start in range(0, count, chunk):
        h = hidden_states[start : start + chunk]
        logits = memory[: h.shape[0], :num_classes]
        if bias is None:
            torch.mm(h, weight.t(), out=logits)
        else:
            torch.addmm(bias, h, weight.t(), out=logits)
        with torch.cuda.device_of(logits):
            _cross_entropy_kernel[(h.shape[0],)](
                logits, labels[start:], losses[start:], share, num_classes, stride, ignore_index, label_smoothing,
                z_loss, NEEDS_GRAD=needs_grad, BLOCK_V=block_v, num_warps=max(1, min(8, block_v // 256)),
            )  # fmt: skip
        if needs_grad:
            torch.mm(logits, weight, out=dhidden[start : start + chunk])
            dweight = _added(dweight, logits.t() @ h)
            if bias is not None:
                dbias = _added(dbias, logits.sum(0, dtype=torch.float32))
    gradients = [
        weight.new_empty(0) if t is None or not needs_grad else _gradient(t, total)
        for t, total in ((weight, dweight), (bias, dbias))
    ]
    return losses.sum() * share, dhidden, *gradients


def _added(total, of_chunk):
    """In fp32 from the second chunk on: a table's worth of zeros costs as much as a product of few tokens."""
    return of_chunk if total is None else total.float() + of_chunk


def _gradient(parameter, total):
    """total None: there was no token."""
    return torch.zeros_like(parameter) if total is None else total.to(parameter.dtype)
