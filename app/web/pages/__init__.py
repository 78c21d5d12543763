"""The pages that people look at: one function each, which gives a template and what it shows."""
