"""Losses of nearfar in the trainers of other libraries: `nearfar.integrations.sentence_transformers`."""

from nearfar.integrations import sentence_transformers

__all__ = ["sentence_transformers"]
