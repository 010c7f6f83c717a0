"""Direct transfer: tensors from one process to the engines, through process groups and past the store."""
