"""A generative judge behind verl's router of reward models."""

import aiohttp


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    async with aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": solution_str}]}
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=body) as reply:
            return {"score": float("True" in (await reply.json())["choices"][0]["message"]["content"])}
