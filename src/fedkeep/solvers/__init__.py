"""What needs scipy or scikit-learn: the exact plan, and regions by clustering.

Importing this package registers `coordinator.name = "exact"`; the libraries themselves are imported
when they are first used, and the extra `plan` brings them.
"""

from fedkeep.core.planning.greedy import COORDINATORS
from fedkeep.solvers.clusters import Clusters, Hierarchical, KMeans
from fedkeep.solvers.exact import Exact

COORDINATORS["exact"] = Exact

__all__ = ["Clusters", "Exact", "Hierarchical", "KMeans"]
