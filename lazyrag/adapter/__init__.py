"""What every framework's adapter needs; knows no framework."""
