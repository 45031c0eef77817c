"""Routers, experts, and how tokens reach them."""
