"""The paper's tables again: our numbers beside the paper's, and a verdict on each of its claims."""
