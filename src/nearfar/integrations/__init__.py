"""Losses of nearfar in the trainers of other libraries."""
