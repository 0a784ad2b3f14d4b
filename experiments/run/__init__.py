"""Flags, folders, tables and journals that every experiment has."""
