"""Maps samples to what trainers read: pure mappings of rows, without the trainers' packages."""
