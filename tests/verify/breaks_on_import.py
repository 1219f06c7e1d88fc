"""Imports what nobody has."""

import no_such_library  # noqa: F401
