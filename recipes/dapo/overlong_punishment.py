"""Soft overlong punishment (arXiv:2503.14476, eq. 13). The trainer's hook ``shape_reward`` adds it to a score."""


def overlong_punishment(length: int, limit: int, buffer: int) -> float:
    """Return ``R_length`` of eq. 13: 0 up to ``limit - buffer`` tokens, then linear, -1 from ``limit`` on.

    Args:
        length: tokens of the response, the end-of-sequence token included.
        limit: ``L_max``. ``buffer``: ``L_cache``, between 1 and ``limit``.
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))
