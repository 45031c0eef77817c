"""Servers of the Tinker API, and recipes of the tinker-cookbook that run against them without a network."""
