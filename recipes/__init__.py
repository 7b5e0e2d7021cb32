"""Recipes that ship with the package, and the embedded quick-start model."""
