"""What one machine offers: its container engine, cgroups, disks, kernel calls, and slots shared by its processes."""
