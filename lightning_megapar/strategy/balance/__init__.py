"""A run kept in balance: what is measured and decided in it, and blocks that change their stage."""
