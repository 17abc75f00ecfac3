"""Known signs beside laptop verdicts: who counts as agreeing, and what is counted."""

from __future__ import annotations

import pytest
import yaml

from core.tracking.confidence_intervals import wilson
from results.reporting import claims
from results.reporting.claims import AGREES, DISAGREES, UNDECIDED, headline, known_claims, page
from results.reporting.pages import draw_effects, html, markdown
from results.reporting.study import Record, Records, StudyError, load_study

SEEDS = [1, 2, 3, 4]
SOURCES = ["one group (arXiv:1)", "another (arXiv:2)"]
EVERY = ["toy/study", "rises", "up is greater", "+20", "confirmed"]
FALLS = (-0.21, -0.2, -0.19, -0.2)


def claim(arm: str, direction: str, **changed) -> dict:
    one = {"text": f"{arm} is {direction}", "treatment": arm, "control": "base", "metric": "accuracy"}
    return {**one, "direction": direction, "minimum": 0.1, "sources": SOURCES, **changed}


CLAIMS = {
    "rises": claim("up", "greater"),
    "falls": claim("down", "less"),
    "wrong": claim("down", "greater"),
    "unsure": claim("noisy", "greater"),
    "of_the_task": claim("up", "greater", sources=[]),
}
LIFTS = {"base": (0, 0, 0, 0), "up": (0.2, 0.21, 0.19, 0.2), "down": FALLS, "noisy": (0.9, -0.5, 0.4, -0.3)}


def made(tmp_path, changed: dict | None = None) -> list[claims.Known]:
    folder = tmp_path / "recipes"
    (folder / "toy").mkdir(parents=True)
    tree = {
        **{"title": "Toy", "recipe": "toy", "entry": "none", "seeds": SEEDS, "minimum_seeds": 4},
        "arms": {arm: {"label": arm} for arm in LIFTS},
        "metrics": {"accuracy": {"key": "acc", "reduce": "last", "label": "accuracy", "percent": True}},
        "claims": {**CLAIMS, **(changed or {})},
    }
    path = folder / "toy" / "study.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    study, records = load_study(path), Records(tmp_path / "results" / "toy" / "study")
    for arm, lifts in LIFTS.items():
        for seed, lift in zip(SEEDS, lifts, strict=True):
            value = 0.5 + 0.01 * seed + lift
            records.write(Record(arm, seed, "finished", study.registration, {"accuracy": value}))
    return known_claims(tmp_path / "results", folder)


def test_a_verdict_agrees_where_the_claim_is_confirmed(tmp_path):
    found = {one.name: one.outcome for one in made(tmp_path)}
    assert found == {"rises": AGREES, "falls": AGREES, "wrong": DISAGREES, "unsure": UNDECIDED}


def test_the_share_is_of_all_claims(tmp_path):
    low, high = wilson(0.5, 4)
    said = headline(made(tmp_path))
    assert said.startswith("2 of 4 laptop verdicts agree") and f"50%, {low:.0%} to {high:.0%}" in said
    assert said.endswith("Against it: 1. Undecided: 1.")


def test_a_failed_control_leaves_no_verdict(tmp_path):
    control = claim("up", "equal", text="nothing changes (negative control)", sources=[])
    found = made(tmp_path, {"nothing": control})
    assert {one.outcome for one in found} == {UNDECIDED}
    assert {one.why for one in found} == {"the control nothing did not hold"}


def test_effects_point_to_the_known_sign_in_units_of_what_counts(tmp_path):
    bars = {one.name: one.bar for one in made(tmp_path)}
    assert bars["rises"].value == pytest.approx(2.0) and bars["falls"].value == pytest.approx(2.0)
    assert bars["wrong"].value == pytest.approx(-2.0)
    assert bars["falls"].low < 2 < bars["falls"].high


def test_one_source_is_not_enough(tmp_path):
    with pytest.raises(StudyError, match="claims.rises.sources has one source"):
        made(tmp_path, {"rises": claim("up", "greater", sources=SOURCES[:1])})


def test_the_page_shows_each_claim_with_its_sources(tmp_path):
    known = made(tmp_path)
    blocks = list(page(known, [EVERY]))
    text, web = markdown("t", blocks), html("t", blocks)
    for one in known:
        assert one.claim.text in text and one.claim.text in web
    assert all(source in text and source in web for source in SOURCES)
    assert web.count("<svg") == 1 and text.splitlines()[2].startswith("**2 of 4")


def test_the_picture_is_the_same_each_time(tmp_path):
    effects = next(block for block in page(made(tmp_path), []) if isinstance(block, claims.Effects))
    assert draw_effects(effects, 0) == draw_effects(effects, 0)
    assert [bar.label.split()[0] for bar in effects.bars] == ["rises", "falls", "wrong", "unsure"]
