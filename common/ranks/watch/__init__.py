"""What ends every rank when one dies, hangs or goes another way, and says which was the first."""
