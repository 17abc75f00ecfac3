"""Peak memory and speed of the chunked head beside the plain one.

``python -m tests.benchmarks.head_memory`` measures each case in its own process: the highest resident memory during
forward and backward, less what the process held with inputs and weight in place, less the weight's gradient. Fails
(exit 1) if the large case takes more than 1.2 times the memory of the small one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

CASES = {"small": (8192, 1024), "large": (131072, 4096)}  # vocabulary, tokens
BOUND = 1.2
MIB = 2**20


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Peak:
    """The highest resident memory while it is open, sampled every millisecond."""

    def __enter__(self) -> Peak:
        self.bytes, self.open = _resident(), True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.open:
            self.bytes = max(self.bytes, _resident())
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.open = False
        self.thread.join()


def measure(which: str, vocabulary: int, tokens: int, hidden_size: int, repeats: int) -> dict[str, float]:
    """MiB and seconds of one case, in this process."""
    import torch

    from core.head import token_log_probs_and_entropy

    def plain(hidden, weight, labels):
        log_probs = torch.log_softmax((hidden @ weight.T).float(), -1)
        entropy = -(log_probs.detach().exp() * log_probs.detach()).sum(-1)
        return log_probs.gather(1, labels[:, None])[:, 0], entropy

    function = {"chunked": token_log_probs_and_entropy, "plain": plain}[which]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) / hidden_size**0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    few = max(1, tokens // 64)  # loads the kernels and their scratch memory, which are not the method's
    function(hidden[:few], weight, labels[:few])[0].sum().backward()
    weight.grad = hidden.grad = None
    held, seconds = _resident(), []
    with Peak() as peak:
        for _ in range(repeats):
            weight.grad = hidden.grad = None
            start = time.perf_counter()
            function(hidden, weight, labels)[0].sum().backward()
            seconds.append(time.perf_counter() - start)
    gradient = weight.numel() * weight.element_size()
    return {"mib": (peak.bytes - held - gradient) / MIB, "seconds": min(seconds)}


def _in_a_process(which: str, case: str, hidden_size: int, repeats: int) -> dict[str, float]:
    arguments = ["--measure", which, case, "--hidden-size", str(hidden_size), "--repeats", str(repeats)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.head_memory", *arguments], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--measure", nargs=2, metavar=("WHICH", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        which, case = options.measure
        print(json.dumps(measure(which, *CASES[case], options.hidden_size, options.repeats)))
        return 0
    results = {}
    print(f"{'':8} {'case':6} {'vocabulary':>10} {'tokens':>7} {'MiB':>8} {'seconds':>8}")
    for which in ("chunked", "plain"):
        for case, (vocabulary, tokens) in CASES.items():
            result = results[which, case] = _in_a_process(which, case, options.hidden_size, options.repeats)
            print(f"{which:8} {case:6} {vocabulary:10} {tokens:7} {result['mib']:8.0f} {result['seconds']:8.2f}")
    ratio = results["chunked", "large"]["mib"] / results["chunked", "small"]["mib"]
    print(f"large / small, chunked: {ratio:.2f} (bound {BOUND})")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
