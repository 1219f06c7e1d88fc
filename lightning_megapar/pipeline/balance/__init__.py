"""Balance while a run goes on: who is slow, and what to do about it. Pure functions; the moves are the strategy's."""
