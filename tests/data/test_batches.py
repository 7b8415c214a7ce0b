"""Steps of an epoch: every example once, the same for any number of ranks, parts and workers, and as dear for all."""

from __future__ import annotations

import warnings
from itertools import chain, islice, product

import numpy as np
import pytest
import torch
from full import left_to_full, thinned
from seeds import numpy_generator, shifted
from tokenizers import Tokenizer, models

from fastbert.data.batches import GROUP_STEPS, KeyedDataset, Steps, StepSampler, cost, deal
from fastbert.data.collator import PackingCollator
from fastbert.data.loader import make_loader
from fastbert.data.masking import Masking
from fastbert.errors import InputError


def draw_lengths(count: int, longest: int = 512, seed: int = 0) -> np.ndarray:
    """Log-normal, as those of texts: a median of 60 tokens, and few long ones."""
    lengths = numpy_generator(seed).lognormal(4.1, 0.8, count)
    return np.clip(lengths.astype(np.int64), 3, longest)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("max_examples", [None, 20])
def test_every_example_once_within_the_budget(group, max_examples):
    lengths = draw_lengths(5000)
    steps = Steps(lengths, 4096, max_examples, seed=shifted(1), group_by_length=group)
    plans = [steps.of_epoch(epoch) for epoch in (0, 1)]
    for plan in plans:
        assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(5000))
        totals = np.array([lengths[step].sum() for step in plan])
        assert totals.max() <= 4096 and max(map(len, plan)) <= (max_examples or 5000)
        if max_examples is None:
            assert np.sort(totals)[len(totals) // 10] > 0.9 * 4096
    assert not np.array_equal(np.concatenate(plans[0]), np.concatenate(plans[1]))
    assert all(map(np.array_equal, plans[0], steps.of_epoch(0)))


def test_groups_are_of_one_length_and_come_in_any_order():
    lengths = draw_lengths(20_000)
    grouped = Steps(lengths, 4096, group_by_length=True).of_epoch(0)
    plain = Steps(lengths, 4096).of_epoch(0)
    spread, usual = (np.mean([lengths[step].std() for step in plan]) for plan in (grouped, plain))
    assert spread < 0.1 * usual
    means = np.array([lengths[step].mean() for step in grouped])
    assert len(means) > 2 * GROUP_STEPS and abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2


def test_without_a_seed_the_order_is_the_data_sets():
    assert np.array_equal(np.concatenate(Steps(draw_lengths(100), 600, seed=None).of_epoch(3)), np.arange(100))


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_ranks_cost_the_same(ranks):
    """Within 2 % of each other, which is what issue and docs promise, with 32 sequences a rank."""
    lengths = draw_lengths(40_000 if ranks < 64 else 120_000)
    worst = []
    for step in Steps(lengths, 32 * 83 * ranks).of_epoch(0)[:50]:
        costs = cost(lengths[step], 768)
        sums = np.array([costs[part].sum() for part in deal(costs, ranks)])
        worst.append(sums.max() / sums.min() - 1)
    assert max(worst) < 0.02


def test_cost_counts_attention():
    """Multiplications and additions of a layer, written out: 12 H^2 weights a token, and two products of S x S x H."""
    hidden, lengths = 64, np.array([1, 100, 384, 5000])
    by_hand = lengths * 2 * 12 * hidden**2 + 2 * 2 * lengths**2 * hidden
    assert cost(lengths, hidden) * 24 * hidden**2 == pytest.approx(by_hand)


@pytest.mark.parametrize("world_size,parts", [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_ranks_share_each_step_of_one_rank(world_size, parts):
    lengths = draw_lengths(700)
    one = StepSampler(Steps(lengths, 4096), 64)
    expected = [set(step) for step in one]
    samplers = [
        StepSampler(Steps(lengths, 4096), 64, rank=r, world_size=world_size, parts=parts) for r in range(world_size)
    ]
    by_rank = [list(sampler) for sampler in samplers]
    assert [len(batches) for batches in by_rank] == [parts * len(expected)] * world_size == list(map(len, samplers))
    for i, step in enumerate(expected):
        found = [index for batches in by_rank for batch in batches[i * parts : (i + 1) * parts] for index in batch]
        assert len(found) == len(set(found)) and set(found) == step


def test_a_run_goes_on_where_it_stopped():
    steps = Steps(draw_lengths(700), 4096)
    whole = list(StepSampler(steps, 64, epoch=3, parts=2))
    rest = StepSampler(steps, 64, epoch=3, start_step=4, parts=2)
    assert list(rest) == whole[8:] and len(rest) == len(whole) - 8


@thinned(4)
@pytest.mark.filterwarnings("ignore:.* steps have fewer examples")
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("tokens,max_examples", [(512, None), (600, 1), (2048, 7), (10**6, None), (10**6, 64)])
@pytest.mark.parametrize("count", [1, 2, 65, 130])
def test_what_is_in_a_step_does_not_depend_on_ranks_and_parts(count, tokens, max_examples, group):
    """Also where a step has fewer examples than there are ranks and parts. No rank waits for a batch in vain:
    all ranks have as many, of as many steps as `Steps` counts."""
    steps = Steps(draw_lengths(count), tokens, max_examples, seed=3, group_by_length=group)
    for epoch, world_size, parts in product((0, 1), (1, 2, 3, 8), (1, 2, 5)):
        expected = [sorted(step.tolist()) for step in steps.of_epoch(epoch)]
        assert sorted(chain(*expected)) == list(range(count))
        for start in (0, len(expected) - 1):
            options = {"epoch": epoch, "start_step": start, "world_size": world_size, "parts": parts}
            ranks = [StepSampler(steps, 64, rank=rank, **options) for rank in range(world_size)]
            by_rank = [list(sampler) for sampler in ranks]
            assert {len(batches) for batches in by_rank} == {(len(expected) - start) * parts} == set(map(len, ranks))
            for i, wanted in enumerate(expected[start:]):
                shares = [batches[i * parts : (i + 1) * parts] for batches in by_rank]
                assert sorted(index for share in shares for batch in share for index in batch) == wanted
                filled = [sum(map(bool, share)) for share in shares]
                if len(wanted) < world_size * parts:  # one each, and no rank has two more than another
                    assert sum(filled) == len(wanted) and max(filled) - min(filled) <= 1
                else:
                    assert set(filled) == {parts}


@left_to_full(lambda p: p["group"])  # the order is made before there are workers
@pytest.mark.parametrize("group", [False, True])
def test_workers_change_nothing(group):
    """Ids, masks and labels are the same bits with 0, 1 and 2 workers, and after a restart in the middle."""
    vocab = {"[MASK]": 0} | {f"w{i}": i for i in range(1, 50)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.add_special_tokens(["[MASK]"])
    masking = Masking(0, np.arange(50) < 1)
    draw, lengths = numpy_generator(0), draw_lengths(300, 64)
    examples = [{"input_ids": draw.integers(1, 50, n).tolist()} for n in lengths]

    def batches(workers: int, start: int = 0) -> list:
        steps = Steps(lengths, 1024, seed=shifted(5), group_by_length=group)
        sampler = StepSampler(steps, 64, epoch=2, start_step=start, parts=2)
        collate = PackingCollator(masking, padded_outputs=False)
        return list(islice(make_loader(examples, sampler, collate, workers=workers), 8))

    expected = batches(0)
    for found in (batches(1), batches(2), expected[:2] + batches(2, 1)[:6]):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours["input_ids"], theirs["input_ids"]) and torch.equal(ours["labels"], theirs["labels"])
    assert any((batch["labels"] != -100).any() for batch in expected)


def test_steps_too_small_for_the_ranks_are_told_of_once():
    """Of nine examples four make a step; the last step has one."""
    steps = Steps(np.full(9, 10), 40, seed=None)
    with pytest.warns(UserWarning, match="3 of 3 steps have fewer examples than 5 ranks with 1 batches each"):
        StepSampler(steps, 64, world_size=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StepSampler(steps, 64, rank=1, world_size=5)
        StepSampler(steps, 64, world_size=2, parts=2)


@pytest.mark.filterwarnings("ignore:.* steps have fewer")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_examples_has_the_fields_of_others(workers):
    examples = [{"input_ids": [5, 6, 7], "labels": [-100, 2, 3]}, {"input_ids": [8], "labels": [1]}]
    sampler = StepSampler(Steps(np.array([3, 1]), 8), 64, parts=4)
    found = list(make_loader(examples, sampler, PackingCollator(padded_outputs=False), workers=workers))
    assert [batch["batch"].batch_size for batch in found] == [1, 1, 0, 0]
    for empty in found[2:]:
        assert list(empty) == list(found[0]) and empty["batch"].cu_seqlens.tolist() == [0]
        assert all(empty[name].shape == (0,) for name in ("input_ids", "labels"))


def test_many_examples_are_fetched_at_once():
    class Source(list):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    source = Source({"input_ids": [i]} for i in range(5))
    data, later = (KeyedDataset(source, seed=shifted(1), epoch=epoch) for epoch in (0, 1))
    both = data.__getitems__([3, 1])
    assert [example["input_ids"] for example in both] == [[3], [1]]
    assert both[1] == data[1] and later[1]["example_key"] != data[1]["example_key"]


@pytest.mark.parametrize(
    "lengths,tokens,options,said",
    [
        ([], 10, {}, "no examples"),
        ([3, 0], 10, {}, "example 1 has no tokens"),
        ([3, 11], 10, {}, "example 1 has 11 tokens, and a step has 10"),
        ([3], 10, {"max_examples": 0}, "max_examples is 0"),
    ],
)
def test_bad_steps(lengths, tokens, options, said):
    with pytest.raises(InputError, match=said):
        Steps(np.array(lengths), tokens, **options)


def test_bad_ranks():
    with pytest.raises(InputError, match="rank is 2 of world_size 2"):
        StepSampler(Steps(np.array([1]), 1), 64, rank=2, world_size=2)
