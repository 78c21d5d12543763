"""Rows in the SWE-bench schema, the contexts of their images, and the recipe that measures them."""
