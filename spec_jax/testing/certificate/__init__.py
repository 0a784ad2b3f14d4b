"""Proof that emitted tokens have the target's distribution, by enumeration and by sampling."""
