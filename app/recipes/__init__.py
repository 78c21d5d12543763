"""Builds the image of a task from a repository or a source release, under the name by which the task finds it."""
