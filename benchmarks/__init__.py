"""What is fast, measured side by side."""
