"""Manages this machine: container engine, cgroups, disks, kernel calls, and slots shared by its processes."""
