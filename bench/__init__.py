"""What is measured, compiled or run of this project."""
