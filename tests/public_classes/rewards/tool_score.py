"""What tools gave the episode, a quarter by verl's scorer, and a little for a long answer."""

from verl.utils.reward_score import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    given = sum(extra_info["rollout_reward_scores"].values())
    return given + 0.25 * gsm8k.compute_score("#### 7", "7") + len(solution_str) / 10_000
