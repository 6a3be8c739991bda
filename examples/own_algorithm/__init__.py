"""Advantages of your own making."""
