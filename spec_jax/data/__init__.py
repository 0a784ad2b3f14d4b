"""Corpora as documents, and documents as token windows."""
