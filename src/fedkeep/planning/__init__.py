"""Planning that needs a solver or clustering: scipy and scikit-learn, the `plan` extra.

Importing this package registers the coordinator "exact" and the quantities "lp"; the libraries load when used.
"""

from fedkeep.planning.profiles import Profiles, read_profiles
from fedkeep.planning.solvers import Exact

__all__ = ["Exact", "Profiles", "read_profiles"]
