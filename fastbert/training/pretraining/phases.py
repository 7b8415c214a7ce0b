"""The phases of a pre-training run: how long its examples are, how large its steps, and how much of them is masked."""

from __future__ import annotations

from fastbert.errors import ConfigError
from fastbert.training.options import PretrainOptions
from fastbert.training.task import Phase

RAMP = 8  # parts in which a masking rate goes from one value to another
WARM_PARTS = 4  # steps begin with a quarter of their tokens, then have half of them, then three quarters


def phases_of(options: PretrainOptions, steps: int) -> tuple[Phase, ...]:
    """The phases of a run of so many steps. Raises ConfigError: options that make none."""
    lengths, rates = length_schedule(options), masking_schedule(options)
    warm = options.batch_warmup
    if not 0.0 <= warm < 1.0:
        raise ConfigError(f"batch_warmup is {warm}; it must be at least 0, and below 1")
    ends = _ends([share for share, _ in lengths])
    cuts = {round(steps * end) for end in ends}
    cuts |= {round(steps * i / RAMP) for i in range(1, RAMP + 1)} if rates[0] != rates[1] else set()
    cuts |= {round(steps * warm * i / WARM_PARTS) for i in range(1, WARM_PARTS)} if warm else set()
    phases, start = [], 0
    for until in sorted(cut for cut in cuts | {steps} if cut > 0):
        at = (start + until) / 2 / steps  # the middle of the phase, as a share of the run
        nth = min(sum(end <= at for end in ends), len(lengths) - 1)
        length = lengths[nth][1]
        size = min(1.0, int(at / warm * WARM_PARTS + 1) / WARM_PARTS) if warm else 1.0
        tokens = options.step_tokens or options.batch_size * length
        examples = max(1, round(options.batch_size * size)) if options.batch_size else None
        phases.append(
            Phase(until, max(length, int(tokens * size)), examples, length, _rate(rates, start, until, steps))
        )
        start = until
    return tuple(phases)


def length_schedule(options: PretrainOptions) -> list[tuple[float, int]]:
    """(share of the run, tokens of an example) of each part: "0.9:128,0.1:512" is BERT's (Devlin et al. 2018, A.2)."""
    if not options.phases:
        return [(1.0, options.max_length)]
    parts = []
    for part in options.phases.split(","):
        share, _, length = part.partition(":")
        try:
            parts.append((float(share), int(length)))
        except ValueError:
            raise ConfigError(f"phases has {part!r}; a part is SHARE:LENGTH, as in 0.9:128,0.1:512") from None
    if any(share <= 0 or length < 1 for share, length in parts) or abs(sum(share for share, _ in parts) - 1.0) > 1e-6:
        raise ConfigError(f"phases is {options.phases!r}; its shares must be above 0 and add up to 1")
    return parts


def masking_schedule(options: PretrainOptions) -> tuple[float, float]:
    """(masking rate of the first step, of the last one)."""
    first, _, last = options.masking.partition(":")
    try:
        rates = float(first), float(last or first)
    except ValueError:
        raise ConfigError(f"masking is {options.masking!r}; it must be a share, as 0.15, or two, as 0.3:0.15") from None
    if not all(0.0 < rate < 1.0 for rate in rates):
        raise ConfigError(f"masking is {options.masking!r}; it must be above 0 and below 1")
    return rates


def _ends(shares: list[float]) -> list[float]:
    ends, total = [], 0.0
    for share in shares:
        total += share
        ends.append(total)
    return ends


def _rate(rates: tuple[float, float], start: int, until: int, steps: int) -> float:
    """Of a part's first step at the run's beginning, of its last one at the end, linear between."""
    first, last = rates
    if first == last or steps == 1:
        return first
    if start == 0:
        return first
    if until == steps:
        return last
    return first + (last - first) * ((start + until) / 2 / steps)
