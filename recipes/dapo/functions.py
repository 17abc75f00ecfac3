"""The soft overlong punishment of DAPO (arXiv:2503.14476)."""


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """Return ``R_length`` of eq. 13.

    It is 0 up to ``limit - buffer`` tokens (L_max - L_cache) and -1 from ``limit`` on.
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
