"""The questions of an environment of the package ``verifiers``, for ``agent_loop=verifiers`` to play.

python -m data_preprocess.environment --environment NAME_OR_FILE [--arguments '{"key": 1}'] --local_dir ~/data/NAME
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import InputError
from data_preprocess.cli import announced
from data_preprocess.schema import make_row, write_rows

INSTALL = "verifiers is not installed; pip install 'rlrepro[verifiers]'"


def row(source: str, example: Mapping[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return the row of a question: what the environment's rollout begins with stands in ``extra_info``."""
    prompt = [{"role": one["role"], "content": one["content"]} for one in example["prompt"]]
    rest = {name: value for name, value in example.items() if name not in ("prompt", "answer", "example_id")}
    number, columns = example.get("example_id", index), json.dumps(rest, ensure_ascii=False, default=str)
    answer = example.get("answer") or ""
    return make_row(source, prompt, answer, "environment", split=split, index=number, example=columns)


def splits(environment: Any) -> Iterator[tuple[str, Any]]:
    """Yield the data sets of an environment; one without questions of its own for evaluation repeats its others."""
    yield "train", environment.get_dataset()
    yield "test", environment.get_eval_dataset()


def main(argv: Sequence[str] | None = None) -> int:
    """Write ``train.parquet`` and ``test.parquet``. Returns 0, or 2 with a line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m data_preprocess.environment", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--environment", required=True, help="an installed environment, or a file with load_environment"
    )
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON: arguments of load_environment")
    parser.add_argument("--local_dir", required=True, help="folder of the parquet files")
    args = parser.parse_args(argv)
    if announced([args.environment], "", args.local_dir, ["train.parquet", "test.parquet"]):
        return 0
    try:
        try:
            from core.extensions.environments.environment_loop import load_environment
        except ModuleNotFoundError as error:
            raise InputError(INSTALL if error.name == "verifiers" else str(error)) from error
        environment = load_environment(args.environment, args.arguments)
        source = f"verifiers/{Path(args.environment).stem}"
        for split, examples in splits(environment):
            rows = [row(source, example, split, index) for index, example in enumerate(examples)]
            print(write_rows(Path(args.local_dir) / f"{split}.parquet", rows))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
