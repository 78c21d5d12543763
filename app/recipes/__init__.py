"""Builds a task's image from a repository or a source release, under the name that the task uses."""
