"""Advice for a user's own data: which method to use, by how much, and how certain that is."""

from fedkeep.advice.advisor import Advice, advise
from fedkeep.advice.budget import BytePlan, KeptBytes, StorePlan, kept_bytes, spend_bytes

__all__ = [
    "Advice",
    "BytePlan",
    "KeptBytes",
    "StorePlan",
    "advise",
    "kept_bytes",
    "spend_bytes",
]
