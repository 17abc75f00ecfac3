"""The invariants of core/README.md, each with the tests that fail where it is broken."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TESTS = {
    "Heavy packages load late": (
        "tests/test_structure.py::test_composing_scoring_and_reporting_load_no_heavy_package",
    ),
    "One alignment rule": (
        "tests/core/learner/test_learner.py::test_log_probs_and_entropies_are_those_of_a_plain_forward_pass_of_each_row",
    ),
    "Token ids in, token ids out": ("tests/core/engine_contract.py::test_ids_in_ids_out",),
    "The lowest ordinals that pass": (
        "tests/core/rollout/test_collect.py::test_the_lowest_ordinals_that_pass_are_chosen_whatever_the_timing",
    ),
    "A kill loses nothing": (
        "tests/faults/test_resume.py::test_ctrl_c_kills_and_a_damaged_checkpoint_leave_no_trace",
        "tests/faults/test_resume.py::test_every_named_moment",
    ),
    "Collecting ends": (
        "tests/core/rollout/test_collect.py::test_exhausted_trains_on_what_there_is_or_raises_with_counts",
    ),
    "Memory settings do not change the objective": (
        "tests/core/learner/test_learner.py::test_memory_knobs_do_not_change_the_gradient",
        "tests/core/cluster/test_fsdp.py::test_two_ranks_train_as_one_process",
    ),
    "Engine and learner have one policy": (
        "tests/core/engines/test_vllm_engine.py::test_any_stale_weight_is_noticed",
        "tests/core/cluster/test_ray_weights.py::test_a_changed_bit_is_noticed",
    ),
    "No key is ignored silently": (
        "tests/core/config/test_config_keys.py::test_all_problems_come_together",
        "tests/core/config/test_config_rules.py::test_a_key_without_effect_is_listed_with_the_reason",
    ),
    "A scorer reads what the policy wrote": (
        "tests/core/rewards/test_rewards.py::test_only_what_the_policy_wrote_is_judged",
    ),
    "Untrusted work is killed at a deadline": (
        "tests/core/rewards/test_graders.py::test_what_misbehaves_costs_its_own_score_alone",
    ),
    "No number of a table is typed": (
        "tests/test_generated_pages.py::test_the_tables_of_results_are_what_the_committed_runs_give",
        "tests/results/test_report.py::test_the_last_validation_is_reported_not_the_best",
    ),
    "Imports run downwards": (
        "tests/test_structure.py::test_imports_between_packages_run_downwards",
        "tests/test_structure.py::test_no_circle_of_packages_or_files_in_core",
    ),
    "No process holds a whole large model": (
        "tests/core/cluster/test_ray_weights.py::test_every_weight_arrives_bucket_by_bucket",
        "tests/core/cluster/test_ray_shares.py::test_batches_cross_once_without_padding_and_with_the_fields_of_their_phase",
    ),
    "A number belongs to one experiment": (
        "tests/results/test_report.py::test_what_joins_an_experiment_and_what_is_another",
        "tests/core/checkpoint/test_provenance.py::test_another_base_data_or_objective_is_refused_unless_it_is_allowed",
    ),
    "A step's values agree": (
        "tests/core/rollout/test_agent_loop.py::test_no_limit_is_ever_passed_and_every_id_is_where_it_was_sampled",
        "tests/core/learner/test_batching.py::test_sequences_are_prompt_then_response",
    ),
}


def test_each_invariant_has_tests_that_exist():
    page = (ROOT / "core/README.md").read_text(encoding="utf-8").partition("## Invariants")[2]
    titles = [
        title.rstrip(".,") for title in re.findall(r"^\d+\. \*\*(.*?)\*\*", page, re.MULTILINE)
    ]
    assert titles == list(TESTS) and all(TESTS.values())
    named = [name.split("::") for names in TESTS.values() for name in names]
    assert not [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()
    ]
