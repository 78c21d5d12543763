"""This machine: its container engine, cgroups, disks, kernel calls, and slots shared by its processes."""
