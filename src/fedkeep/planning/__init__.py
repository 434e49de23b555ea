"""Planning that needs a solver or clustering: scipy and scikit-learn, the `plan` extra."""
