"""Helpers that several packages share: input checks, files, the terminal, random states, process groups, sums."""
