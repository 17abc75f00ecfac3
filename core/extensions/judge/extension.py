"""A judge behind a URL and a reward model: ``reward_model.enable``. Its keys still stand in the kernel."""

from core.config.extensions import Extension

HERE = "core.extensions.judge"
EXTENSION = Extension(
    name="judge",
    functions={
        "judge": f"{HERE}.judge:Judge",
        "reward_model": f"{HERE}.reward_model:RewardModel",
        "shared_reward_model": f"{HERE}.shared_reward_model:shared_reward_model",
    },
)
