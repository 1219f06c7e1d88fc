"""Gradient reduction over data ranks, ZeRO on FSDP2, and the exact global gradient norm."""
