"""A reward model that two ranks share gives the numbers of one process, and each rank holds half of it."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

from core.cluster import fsdp as shared
from core.rewards.reward_model import RewardModel
from tests.core import fsdp_ranks
from tests.core.rewards.reward_model_runs import (
    REFUSED,
    REFUSES_X,
    answers,
    grade,
    settings,
    write_classifier,
)

KINDS = {  # name -> (classifier, fsdp_config, how passes are cut)
    "tokens": (("token", "qwen2"), {}, {}),
    "sequences": (("sequence", "llama"), {"reshard_after_forward": False, "forward_prefetch": True}, {}),
    "copies": (("token", "llama"), {"fsdp_size": 1}, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}),
}
# The ranks' answers: very different numbers of passes, none at all on a rank, and one that the template refuses
SHARES = ([[0, 1, 2, 3, 4, 5, 6], [7, 8]], [[], [3]], [[9, 2], []])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("ranks"), {}
    for name, ((kind, arch), fsdp_config, passes) in KINDS.items():
        write_classifier(folder / name, kind, arch, template=REFUSES_X)
        config = settings(folder / name, fsdp=fsdp_config, **passes)
        jobs[name] = (grade, config, {"calls": SHARES})
    mp.spawn(fsdp_ranks.run, args=(2, folder, jobs), nprocs=2)
    return {name: (jobs[name][1], torch.load(folder / f"{name}.pt", weights_only=True)) for name in KINDS}


@pytest.mark.processes
@pytest.mark.parametrize("name", KINDS)
def test_scores_are_those_of_one_process(found, name):
    config, (scores, held) = found[name]
    alone = RewardModel(config)
    graded = [*answers(), REFUSED]
    for shares, parts in zip(SHARES, scores, strict=True):
        for share, part in zip(shares, parts, strict=True):
            expected = alone.score([graded[at] for at in share])
            assert [bool(error) for _, error in part] == [bool(one.error) for one in expected]
            for (value, _), one in zip(part, expected, strict=True):
                assert value == pytest.approx(one.value, abs=1e-5, nan_ok=True)
    whole = sum(parameter.numel() for parameter in alone.module.parameters())
    assert held == pytest.approx(whole if name == "copies" else whole / 2, rel=0.05)


def test_only_the_first_rank_reads_weights(tmp_path, monkeypatch):
    read = []
    load = shared.load_classifier
    monkeypatch.setattr(
        shared, "load_classifier", lambda *a, **k: read.append(k.get("on_meta", False)) or load(*a, **k)
    )
    monkeypatch.setattr(shared, "shard", lambda module, *_: module)
    monkeypatch.setattr(shared, "fill", lambda *_: None)
    config = settings(write_classifier(tmp_path))
    for rank, expected in ((0, [False, True]), (1, [True])):
        monkeypatch.setattr(shared.dist, "get_rank", lambda rank=rank: rank)
        shared.shared_reward_model(config, torch.device("cpu"))
        assert read == expected
        read.clear()
