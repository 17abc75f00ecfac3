"""The prompts of Search-R1 and of the baseline that does not search: those of the published
scripts, to the letter."""

SEARCH_PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first "
    "every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search "
    "engine by <search> query "
    "</search> and it will return the top searched results between <information> and "
    "</information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly "
    "provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing "
    "</answer>. "
    "Question: {question}\n"
)
R1_PROMPT = (
    "Answer the given question. You should first have a reasoning process in mind and then "
    "provides the answer. Show "
    "your reasoning in <think> </think> tags and return the final answer in <answer> </answer> "
    "tags, for example "
    "<answer> Beijing </answer>. Question: {question}\n"
)
PROMPTS = {"search": SEARCH_PROMPT, "r1": R1_PROMPT}  # r1: the baseline that does not search
