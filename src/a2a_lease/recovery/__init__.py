"""What becomes of a task whose replica died."""
