"""The experiments of five papers: run them, and see the printed numbers beside ours (`fedstride reproduce`)."""

from fedstride.reproduce.items import Cell, Claim, Item, Measure, Order, best, final, rounds_to, seconds_to
from fedstride.reproduce.store import Found

__all__ = ["Cell", "Claim", "Found", "Item", "Measure", "Order", "best", "final", "rounds_to", "seconds_to"]
