"""Doors to other libraries: one module each, imported only when used."""
