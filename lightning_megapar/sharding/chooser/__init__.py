"""Finds and proves a sharding plan for a module that has none, in one process that plays all tensor ranks."""
