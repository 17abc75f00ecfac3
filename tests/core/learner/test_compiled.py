"""Compiled MLPs and norms: which parts they are, and that a result changes by rounding alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from core.algorithm.losses import MetricSums
from core.errors import InputError
from core.learner import passes
from core.learner.batching import mini_batches
from core.learner.saving import save_model
from tests.core.cluster.test_fsdp import BF16, MEMORY, PACKED, WHOLE, distance, local, local_gradients, on_ranks
from tests.core.ray_cluster import cluster_config, mixed_batch, write_model
from tests.tiny import tiny_model

COMPILED = ("actor_rollout_ref.actor.use_torch_compile=True", "critic.use_torch_compile=True")
CPU = torch.device("cpu")


def compiled_parts(module):
    return {name for name, part in module.named_modules() if part._compiled_call_impl is not None}


def test_mlps_and_norms_of_all_layers_are_compiled_and_nothing_else(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    module = tiny_model()
    passes.compile_parts(module, CPU)
    parts = ("mlp", "input_layernorm", "post_attention_layernorm")
    assert compiled_parts(module) == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}


def test_a_model_without_such_parts_is_refused():
    module = tiny_model("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "COMPILED", ("Nothing",))
        with pytest.raises(InputError, match="use_torch_compile=True: the layers of GPT2LMHeadModel have no part"):
            passes.compile_parts(module, CPU)
    assert any(isinstance(part, GPT2Block) for part in module.modules()) and not compiled_parts(module)


def test_a_machine_that_cannot_compile_is_told_before_the_first_pass(monkeypatch):
    def compile_nothing(function, **options):
        def call(*args):
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

        return call

    monkeypatch.setattr(torch, "compile", compile_nothing)
    module = tiny_model()
    with pytest.raises(InputError, match="use_torch_compile=True: .*No working C.. compiler.*set it to False"):
        passes.compile_parts(module, CPU)
    assert not compiled_parts(module)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tied", arch="llama", tie_word_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), PACKED], ids=["padded", "packed"])
def test_a_compiled_policy_and_critic_train_as_plain_ones(model, layout):
    """Three updates: weights, log-probs, reference and values, in float32."""
    batch = mixed_batch(n=6, alike=True)
    plain, other = (local(cluster_config(model, *layout, *extra), torch.float32, ref=True) for extra in ((), COMPILED))
    for part in (other.actor, other.ref, other.critic):
        assert len(compiled_parts(part.module)) == 6
    assert not compiled_parts(plain.actor.module)
    for _ in range(3):
        for one in (plain, other):
            one.update_critic(batch, 1.0), one.update_actor(batch, 1.0)
    for part in ("actor", "critic"):
        pairs = zip(*(getattr(one, part).module.named_parameters() for one in (plain, other)), strict=True)
        for (name, expected), (_, found) in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)
    for compute in ("compute_ref_log_prob", "compute_values"):
        found, expected = (getattr(one, compute)(batch) for one in (other, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_two_ranks_with_compiled_parts_are_those_of_one_without(model, tmp_path):
    """With every memory knob, in float32 and with bfloat16 passes."""
    batch = mixed_batch()
    jobs = {
        name: ("gradients", cluster_config(model, WHOLE, *COMPILED, *extra), {"batch": batch})
        for name, extra in (("whole", MEMORY), ("packed", PACKED), ("bf16", (BF16,)))
    }
    found = on_ranks(2, tmp_path, jobs)
    expected, loss = local_gradients(cluster_config(model, WHOLE), batch)
    for name in ("whole", "packed"):
        one = getattr(found, name)
        assert one["loss"] == pytest.approx(loss, rel=1e-5)
        assert distance(one["grads"], expected) < 1e-5
    assert 1e-6 < distance(found.bf16["grads"], expected) < 0.05


@pytest.mark.slow
def test_a_checkpoint_of_a_compiled_policy_has_the_plain_names(model, tmp_path):
    one = local(cluster_config(model, *COMPILED), torch.float32)
    (step,) = mini_batches(mixed_batch(), prompts=8, scale_factor=24.0)
    one.actor.mismatch = MetricSums()
    one.actor.accumulate(step, MetricSums())
    save_model(one.actor.module, None, tmp_path / "actor", one.actor.module.state_dict())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert torch.equal(read.get_input_embeddings().weight, one.actor.module.get_input_embeddings().weight)
