"""All answers of a step: the longest right one has less."""


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    longest = max(map(len, solution_strs))
    return [
        (1.0 - 0.1 * (len(answer) == longest)) * (gold in answer)
        for answer, gold in zip(solution_strs, ground_truths, strict=True)
    ]
