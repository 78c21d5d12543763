"""The pages for browsers: each is a function that returns a template with its values."""
