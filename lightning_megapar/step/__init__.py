"""One step as a pipeline of microbatches: the user's own step on each stage, its logs recorded and replayed."""
