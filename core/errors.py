"""The errors that callers tell apart: bad input, and a lost process."""

from collections.abc import Sequence


class InputError(ValueError):
    """Input that cannot be used: one line a problem, each with key or file, value, rule and fix.

    The launcher prints the lines as they are and exits with 2; every other exception keeps its traceback.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class WorkersLost(RuntimeError):
    """A process of the run died or hangs. Another try from the last checkpoint may succeed."""
