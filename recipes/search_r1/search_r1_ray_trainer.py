"""Search-R1 (arXiv:2503.09516): a trajectory is an episode in which the policy searches.

Everything else is the core trainer's: what a search returned lies outside ``response_mask``, so it
carries no loss, no entropy, no KL and no value target (the paper's retrieved-token masking, section
3.1), whatever the algorithm.
"""

from __future__ import annotations

from core.engines.engine import SamplingParams
from core.ray_trainer import RayPPOTrainer
from core.rollout.agent_loop import Limits
from core.types import Prompt, Trajectory


class SearchR1Trainer(RayPPOTrainer):
    """The core trainer with search episodes."""

    async def generate(
        self, prompt: Prompt, sample_index: int, sampling: SamplingParams
    ) -> Trajectory:
        """Play an episode (``recipes.search_r1.search_loop``) under the published lengths.

        ``data.max_response_length`` is a turn's, and prompt and episode together have
        ``data.max_prompt_length`` tokens and one turn more.
        """
        _, whole = self.room(len(prompt.token_ids))
        limits = Limits(whole, self.config.data.max_response_length)
        return await self.sampler.sample(prompt, sample_index, sampling, limits)

    def room(self, prompt: int) -> tuple[int, int]:
        """Return the tokens of a prompt and of the episode behind it."""
        return (
            prompt,
            self.config.data.max_prompt_length + self.config.data.max_response_length - prompt,
        )
