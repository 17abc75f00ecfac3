"""Compares expressions under a time limit by a signal, as works in a main thread alone."""

import signal

from sympy import simplify
from sympy.parsing.sympy_parser import parse_expr


def give_up(number, frame):
    raise TimeoutError("sympy took too long")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    try:
        return 1.0 if simplify(parse_expr(solution_str) - parse_expr(ground_truth)) == 0 else 0.0
    except Exception:
        return 0.0
    finally:
        signal.alarm(0)
