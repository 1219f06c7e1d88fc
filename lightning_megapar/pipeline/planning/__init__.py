"""What a pipeline will cost, and did: simulator, choice of a schedule, split of blocks, traces. Nothing needs torch."""
