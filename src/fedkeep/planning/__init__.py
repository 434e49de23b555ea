"""Planning that needs a solver or clustering: scipy and scikit-learn, the `plan` extra.

Importing this package registers the coordinator "exact" and the quantities "lp"; the libraries load when used.
"""

from fedkeep.planning import lp as _lp
from fedkeep.planning.milp import Exact
from fedkeep.planning.profiles import Profiles, read_profiles

__all__ = ["Exact", "Profiles", "read_profiles"]

del _lp
