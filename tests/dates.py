"""Days that pass while a test runs."""

from __future__ import annotations

from datetime import date

from core.data import vocabulary


def passing_days(monkeypatch) -> type[date]:
    """Have chat templates see another day at each look, from 1 January 2026 on.

    ``number`` of the class counts the looks.
    """

    class Day(date):
        number = 0

        @classmethod
        def today(cls):
            cls.number += 1
            return cls(2026, 1, cls.number)

    monkeypatch.setattr(vocabulary, "date", Day)
    return Day
