"""The demo dataset: real libraries with planted bugs (swebench), terminal tasks (tasks), scripted solutions (replay)."""
