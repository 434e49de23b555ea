"""Advice for a user's own data: which method to use, by how much, and how certain that is."""

from fedkeep.advice.advisor import Advice, advise

__all__ = ["Advice", "advise"]
