"""A mixture of experts: the router, products of unequal groups of tokens, losses that balance the load."""
