"""What trainers read, made of samples: pure mappings of rows, without the trainers' packages."""
