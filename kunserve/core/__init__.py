"""The vocabulary every other room speaks. Standard library only."""
