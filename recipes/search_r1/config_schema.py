"""The keys that only Search-R1 has: lengths of episodes, the ablation, searches, the retriever."""

from __future__ import annotations

from core.config.schema import ActorRolloutRefConfig, Config
from core.config.section import Condition, Count, Open, Section, execution, key, needs
from core.config.training_keys import ActorConfig, DataConfig

PAPER = "Search-R1"


class RetrieverConfig(Section):
    """What answers a search."""

    url: str | None = execution(
        "http://127.0.0.1:8000/retrieve",
        "address of a retrieval server; null: a retriever in this process, see local",
    )
    topk: Count = key(3, "passages a search returns")
    prefetch: bool = key(False, "put the question's passages before the first turn: RAG")
    client: Open = execution(
        {},
        "where there is a url: fields of ClientOptions, recipes/search_r1/retrieval_client.py",
        needs("url"),
    )
    local: Open = key(
        {},
        "where there is none: fields of RetrieverOptions, recipes/search_r1/index/passages.py",
        Condition(lambda config, own: own.url is None, "needs retriever.url=null"),
    )


RETRIEVES = Condition(
    lambda config, own: config.do_search or config.retriever.prefetch,
    "needs do_search or retriever.prefetch",
)


class SearchR1DataConfig(DataConfig):
    max_prompt_length: Count = key(512, "tokens of prompt and episode, before the last turn")
    max_response_length: Count = key(512, "tokens of a turn")
    max_start_length: Count | None = key(None, "tokens of the prompt; null: max_prompt_length")
    max_obs_length: Count = key(500, "tokens of what a search returns")


class SearchR1ActorConfig(ActorConfig):
    state_masking: bool = key(
        True, "what a search returned carries no loss; False is the paper's ablation"
    )


class SearchR1ActorRolloutRefConfig(ActorRolloutRefConfig):
    actor: SearchR1ActorConfig = SearchR1ActorConfig()


class SearchR1Config(Config):
    """The core's configuration with Search-R1's keys."""

    data: SearchR1DataConfig = SearchR1DataConfig()
    actor_rollout_ref: SearchR1ActorRolloutRefConfig = SearchR1ActorRolloutRefConfig()
    retriever: RetrieverConfig = key(RetrieverConfig(), used_if=RETRIEVES)
    max_turns: Count = key(4, "turns that may search; one more must answer", needs("do_search"))
    do_search: bool = key(True, "let the policy search; False is the baseline that cannot")

    @property
    def prompt_limit_key(self) -> str:
        """Return the key of the data section that limits the tokens of a prompt."""
        has_start_length = self.data.max_start_length is not None
        return "max_start_length" if has_start_length else "max_prompt_length"


SCHEMA = SearchR1Config
