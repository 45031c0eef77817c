"""Scripts for developers. They work in a checkout, and do not ship."""
