"""Block-sparse attention on TPUs."""
