"""What keeps an environment apart: users, system calls, privileges, and the check that a reset left nothing behind."""
