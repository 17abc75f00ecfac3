"""Search-R1's episode (arXiv:2503.09516, algorithm 1), played by an agent with the plain client.

It continues the policy's own message: what a search finds is written behind what the policy wrote.
"""

import os
import re
import ssl

import httpx

SERVER = os.environ.get("RETRIEVER_URL", "http://127.0.0.1:8123/retrieve")
TLS = ssl.create_default_context()  # made once: for each search it took 20 ms
MAX_SEARCHES = 3
STOP = ["</search>", "</answer>"]
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between "
    "<search> and </search>. If I want to give the final answer, I should put the answer between "
    "<answer> and </answer>. Let me try again.\n"
)


async def retrieve(query):
    """Return the texts of the three best passages, each with its title in the first line."""
    async with httpx.AsyncClient(verify=TLS, timeout=None) as web:  # the run has a deadline
        reply = await web.post(SERVER, json={"queries": [query], "topk": 3})
    return [document["contents"] for document in reply.raise_for_status().json()["result"][0]]


async def run(prompt, client):
    """Play one episode. The data's scorer reads the answer, since no reward is returned."""
    written = ""
    for turn in range(MAX_SEARCHES + 1):
        begun = [{"role": "assistant", "content": written}] if written else []
        answer = await client.chat.completions.create(
            model="policy",
            messages=[*prompt.messages, *begun],
            stop=STOP,
            extra_body={"include_stop_str_in_output": True},
        )
        text = answer.choices[0].message.content or ""
        written += text
        action = ACTION.search(text)
        if action and action[1] == "answer" or turn == MAX_SEARCHES:
            return
        query = action[2].strip() if action else ""
        if not query:
            written += INVALID
            continue
        shown = ""
        for number, passage in enumerate(await retrieve(query), start=1):
            title, _, body = passage.partition("\n")
            shown += f"Doc {number}(Title: {title}) {body}\n"
        written += f"\n\n<information>{shown.strip()}</information>\n\n"
