"""Reference models built from the parallel layers. Import them from their own modules."""
