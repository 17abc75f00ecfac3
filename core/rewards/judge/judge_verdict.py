"""How a judge's reply is read: a number by a pattern, or a JSON object by a schema. Anything doubtful is no verdict.

Patterns are the user's and texts are models': a match may take exponential time, which Python's own ``re`` would wait
for with the whole run. The package regex gives up after ``MATCH_S``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import regex

from core.errors import InputError
from core.rewards.judge.judge_prompt import read_text

if TYPE_CHECKING:
    from core.config.sections.reward import JudgeConfig

BRACKETS = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
KEY = "reward_model.judge"
FIELD = "score"  # of the JSON object
MATCH_S = 1.0  # seconds for a pattern on a text; the linear ones need about a millisecond


class NoVerdict(ValueError):
    """A reply from which no number can be read."""


@dataclass(frozen=True)
class VerdictRule:
    """Reads a number between ``lowest`` and ``highest`` by ``pattern`` (its one group) or by ``schema``."""

    lowest: float
    highest: float
    pattern: str | None
    schema: Mapping[str, Any] | None

    @classmethod
    def of(cls, config: JudgeConfig) -> VerdictRule:
        """Build from ``reward_model.judge``. Raises InputError for a pattern or a schema that cannot give a number."""
        if config.json_schema is not None:
            return cls(config.lowest, config.highest, None, _read_schema(config.json_schema))
        pattern = config.pattern if config.pattern is not None else BRACKETS
        try:
            groups = regex.compile(pattern).groups
        except regex.error as error:
            raise InputError(f"{KEY}.pattern={pattern}: is no regular expression ({error}); correct it") from error
        if groups != 1:
            raise InputError(f"{KEY}.pattern={pattern}: must have one group, the number; it has {groups}")
        return cls(config.lowest, config.highest, pattern, None)

    @property
    def request(self) -> dict[str, Any]:
        """Return the fields of a request that make the server keep to the schema, where it can."""
        if self.schema is None:
            return {}
        schema = {"name": "verdict", "schema": self.schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    @property
    def middle(self) -> float:
        return (self.lowest + self.highest) / 2

    def read(self, reply: str) -> float:
        """Return the number of a reply. Raises NoVerdict."""
        value = self._by_schema(reply) if self.schema is not None else self._by_pattern(reply)
        if not (math.isfinite(value) and self.lowest <= value <= self.highest):
            raise NoVerdict(f"{value:g} is not between {KEY}.lowest={self.lowest:g} and highest={self.highest:g}")
        return value

    def _by_pattern(self, reply: str) -> float:
        try:
            matches = regex.findall(self.pattern, reply, timeout=MATCH_S)
        except TimeoutError:
            raise NoVerdict(f"{KEY}.pattern={self.pattern} did not come to an end on it in {MATCH_S:g} s") from None
        try:
            values = {float(one) for one in matches}
        except ValueError:
            raise NoVerdict(f"the pattern found {matches[0]!r:.50}, which is no number") from None
        if not values:
            raise NoVerdict("the pattern finds nothing in it")
        if len(values) > 1:  # such as one quoted from the answer: which of them is the judge's own is a guess
            raise NoVerdict("it holds verdicts that contradict one another")
        return values.pop()

    def _by_schema(self, reply: str) -> float:
        import jsonschema

        try:
            verdict = json.loads(reply)
            _validator(self.schema).validate(verdict)
        except TimeoutError:
            raise NoVerdict(f"a pattern of the schema did not come to an end on it in {MATCH_S:g} s") from None
        except (ValueError, RecursionError) as error:
            raise NoVerdict(f"it is not JSON ({error})") from None
        except jsonschema.ValidationError as error:
            raise NoVerdict(f"it does not follow the schema ({error.message:.200})") from None
        value = verdict.get(FIELD) if isinstance(verdict, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NoVerdict(f"its {FIELD!r} is no number")
        try:
            return float(value)
        except OverflowError:
            raise NoVerdict(f"its {FIELD!r} is too large") from None

    def occurs_in(self, text: str) -> bool:
        """Return whether a text holds what would be read as a verdict, if a judge repeated it, or may hold it."""
        pattern = self.pattern if self.schema is None else rf'"{FIELD}"\s*:'
        try:
            return regex.search(pattern, text, timeout=MATCH_S) is not None
        except TimeoutError:
            return True


def _validator(schema: Mapping[str, Any]) -> Any:
    """Return jsonschema's validator of a schema, whose patterns raise TimeoutError after ``MATCH_S``."""
    import jsonschema

    def matches(validator: Any, pattern: str, text: Any, schema: Any) -> Iterator[Any]:
        if isinstance(text, str) and not regex.search(pattern, text, timeout=MATCH_S):
            yield jsonschema.ValidationError(f"{text!r:.50} does not match {pattern!r}")

    usual = jsonschema.validators.validator_for(schema)
    return jsonschema.validators.extend(usual, {"pattern": matches})(schema)


def _read_schema(path: str) -> Mapping[str, Any]:
    import jsonschema

    key = f"{KEY}.json_schema={path}"
    try:
        schema = json.loads(read_text(path, f"{KEY}.json_schema"))
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{key}: is not JSON ({error}); correct it") from error
    except jsonschema.SchemaError as error:
        raise InputError(f"{key}: is no JSON schema ({error.message}); correct it") from error
    if '"patternProperties"' in json.dumps(schema):
        rule = "has patternProperties, and a name would be matched without a limit of time"
        raise InputError(f"{key}: {rule}; list the names under properties")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or FIELD not in properties or FIELD not in schema.get("required", ()):
        raise InputError(f"{key}: must require a property {FIELD!r}, the number; add it to properties and required")
    return schema
