"""Hugging Face directories in and out, on any layout."""
