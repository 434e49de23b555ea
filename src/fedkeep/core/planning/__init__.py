"""Which device stores which label: profiles in, a plan out (steps 1 and 2 of the paper)."""
