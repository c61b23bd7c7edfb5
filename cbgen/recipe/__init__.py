"""Recipes: the YAML that says what a job does, read, checked and described. No torch, no model."""

from __future__ import annotations
