"""Learners: models as flat vectors, measured and trained with numpy or torch."""
