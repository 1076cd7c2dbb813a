"""The one error a user sees, and what it says about names nobody knows."""

import difflib
from collections.abc import Iterable
from typing import Any


class FedstrideError(ValueError):
    """Bad input: one sentence that says what is wrong, where, and what would be right."""


def unknown(what: str, name: Any, known: Iterable[str]) -> str:
    """A sentence about a name nobody knows, with the nearest one that is known."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Choose from {', '.join(known)}"
